"""An operator launches one kernel and runs nothing else, which is what counts of launches count."""

import pytest
from kernel_cases import LEARN_NAMES, NAMES, case_of
from torch.utils._python_dispatch import TorchDispatchMode

from evo_grpo.model.llama.cuda import operators

#: Operations that run no kernel.
FREE = {"new_empty", "empty_like", "empty", "view", "detach"}


class Launches:
    """Stands for the module of kernels, and keeps the names of those that are launched."""

    def __init__(self):
        self.names = []

    def __getattr__(self, name):
        return _Kernel(name, self.names)


class _Kernel:
    def __init__(self, name, names):
        self.name, self.names = name, names

    def __getitem__(self, grid):
        assert all(size > 0 for size in grid)
        return lambda *args, **options: self.names.append(self.name)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


class _Inside:
    """The operators without torch's dispatch, so that what is inside is seen."""

    def __init__(self, operations):
        self.operations = operations

    def __getattr__(self, name):
        def call(*args):
            with self.operations:
                return operators.LAUNCHES[name](*args)

        return call


@pytest.mark.parametrize("name", NAMES + LEARN_NAMES)
def test_one_kernel_and_no_operation_of_torch(name, monkeypatch):
    launched, operations = Launches(), Operations()
    for own in ("_kernels", "_learn_kernels"):
        monkeypatch.setattr(operators, own, lambda: launched)
    case_of(name, 3).run(_Inside(operations))
    two = {"draw": ["weigh_blocks", "draw_token"], "attend_splits": ["attend", "join_splits"]}
    assert launched.names == two.get(name, [name])
    assert set(operations.names) <= FREE
