"""What a run was made of: its settings, the files that it reads, and the software that played it.

A folder records it when its run begins. A resume compares: what has changed is refused by name, or
honoured and recorded by name where the rounds that are left can follow it. So does what trains
beside a finished run, but it records nothing there.
"""

from evo_grpo.inputs.differences import ROUNDS, changed_settings, check_whole, may_change
from evo_grpo.inputs.going_on import (
    Changed,
    begun_extension,
    check_inputs,
    compare_inputs,
    record_changes,
    record_inputs,
    run_id,
    was_the_end,
)
from evo_grpo.inputs.made_of import Inputs, inputs_of, read_inputs_of

__all__ = [
    "ROUNDS",
    "Changed",
    "Inputs",
    "begun_extension",
    "changed_settings",
    "check_inputs",
    "check_whole",
    "compare_inputs",
    "inputs_of",
    "may_change",
    "read_inputs_of",
    "record_changes",
    "record_inputs",
    "run_id",
    "was_the_end",
]
