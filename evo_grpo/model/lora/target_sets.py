"""The sets of layers, by name, of which each adapter of a search over `target_modules` has one."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import final

from peft import LoraConfig

from evo_grpo.errors import ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.configs import linear_modules, matched_modules
from evo_grpo.model.lora.targets import check_targets, settle_targets
from evo_grpo.schema.patterns import ALL
from evo_grpo.schema.problems import unknown_name
from evo_grpo.settings.adapters import missing_layers


@final
class TargetSets:
    """Sets of layers of a base.

    Args:
        base: The base.
        config: Settings of new adapters.
        declared: `target_modules` by the name of each set.
    """

    def __init__(
        self, base: SharedBase, config: LoraConfig, declared: Mapping[str, str | Sequence[str]]
    ) -> None:
        self._base = base
        self._config = config
        self._declared = declared
        self._modules: dict[str, frozenset[str]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def modules(self, name: str) -> frozenset[str]:
        """Return the full names of the layers of a set.

        Raises:
            ConfigError: No set has this name, or the base lacks a layer that the set names.
            ModelError: A layer does not get the rows of a batch in a known order.
        """
        if name not in self._modules:
            self._modules[name] = self._found(name)
        return self._modules[name]

    def name_of(self, modules: Collection[str]) -> str | None:
        """Return the name of the set of exactly these layers; None if there is none."""
        return next((name for name in self if self.modules(name) == frozenset(modules)), None)

    def adapting(
        self, config: LoraConfig, name: str, present: Collection[str] | None = None
    ) -> LoraConfig:
        """Return a configuration with the layers of a set.

        Args:
            config: The configuration.
            name: The set.
            present: Full names of the layers that it adapts; None if unknown. Where these are the
                layers of the set, the configuration stays, since it may name them otherwise.
        """
        if present is not None and self.modules(name) == frozenset(present):
            return config
        return with_targets(config, self._declared_as(name))

    def check(self) -> None:
        """Check all sets.

        Raises:
            ConfigError: As for `modules`; or two sets have the same layers.
            ModelError: As for `modules`.
        """
        known: dict[frozenset[str], str] = {}
        for name in self:
            other = known.setdefault(self.modules(name), name)
            if other != name:
                raise ConfigError(
                    f"lora.target_sets: expected sets that differ, got {other!r} and {name!r}, "
                    f"which are the same layers of {self._base.name}; remove one of them"
                )

    def _declared_as(self, name: str) -> str | Sequence[str]:
        if name not in self._declared:
            text = unknown_name(name, self._declared, "model.lora.target_sets")
            raise ConfigError(f"lora.target_modules: {text}")
        return self._declared[name]

    def _found(self, name: str) -> frozenset[str]:
        targets = self._declared_as(name)
        base, excluded = self._base, self._config.exclude_modules or ()
        layers = linear_modules(base.model)
        if text := missing_layers(targets, layers, base.name, excluded):
            raise ConfigError(f"lora.target_sets.{name}: {text}")
        config = settle_targets(base, with_targets(self._config, targets))
        if config.target_modules == ALL:
            config = with_targets(config, layers)
        found = matched_modules(base.model, config)
        if others := sorted(found - layers):
            raise ConfigError(
                f"lora.target_sets.{name}: expected linear layers, and not the output head, got "
                f"{others[0]!r}; name other layers"
            )
        check_targets(base, found)
        return frozenset(found)


def with_targets(config: LoraConfig, targets: str | Collection[str]) -> LoraConfig:
    """Return a configuration with other `target_modules`."""
    made = copy.deepcopy(config)
    made.target_modules = targets if isinstance(targets, str) else set(targets)  # pyright: ignore[reportAttributeAccessIssue] -- typed as list, kept by PEFT as set
    return made
