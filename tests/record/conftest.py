"""Runs drawn at random, as fixtures; tests that draw many take the factories themselves."""

from random_runs import hp_config_fixture, make_run_fixture, with_scores_fixture

__all__ = ["hp_config_fixture", "make_run_fixture", "with_scores_fixture"]
