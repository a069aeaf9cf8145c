"""Comparisons and replays, of a finished run and of its earlier ends."""

import json
import shutil

import pytest
from small_run import Told

from evo_grpo import resume
from evo_grpo.after.arms import compare
from evo_grpo.after.verifying.verify import verify
from evo_grpo.record.arms import read_comparison
from evo_grpo.record.names import REPLAYED


def change(file, apply):
    data = json.loads(file.read_text())
    apply(data)
    file.write_text(json.dumps(data))


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.slow
def test_what_was_added_is_as_it_was_written(added, made):
    found, alone = verify(added), verify(made / "finished")
    assert found.damage == found.notes == []
    assert found.rounds == alone.rounds == 3
    files = [path for path in (added / "compare").rglob("*") if path.is_file()]
    files += [path for path in (added / "replay").rglob("*") if path.is_file()]
    locks = [path for path in files if path.name == ".lock"]
    assert found.files - alone.files >= len(files) - len(locks)


ADDED = [
    "compare/guess/completions/round-0000.jsonl",
    "compare/random/checkpoints/round-0000/agent-01/optimizer.safetensors",
    "compare/guess/population.yaml",
    "compare/random/inputs.json",
    "compare/random/summary.json",
    "compare/compare.json",
    "replay/constant-run/actor/adapter_model.safetensors",
    "replay/schedule-run/attributes.json",
    "replay/replay.json",
]
WRITTEN_LAST = ("compare/compare.json", "replay/replay.json")


def delete(file):
    file.unlink()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, flip) for name in ADDED),
        *((name, delete) for name in ("compare/random/summary.json", *WRITTEN_LAST)),
    ],
)
def test_any_file_of_what_was_added_is_looked_at(added, name, damage):
    file = added / name
    before = file.read_bytes()
    damage(file)
    if not file.exists() and name in WRITTEN_LAST:
        # What is written last is written anew by the command that was stopped.
        found = verify(added)
        assert found.damage == []
        (text,) = found.notes
        assert "evo-grpo" in text
    elif file.exists() and before[-1:] == b"\n" and name != "replay/schedule-run/attributes.json":
        # A last byte that is no line end any more: what says the same is the same.
        file.write_bytes(before[: len(before) // 2])
        assert any(name.partition("/")[0] in text for text in verify(added).damage)
    else:
        assert any(name.partition("/")[0] in text for text in verify(added).damage)


@pytest.mark.parametrize("arm", [0, 1, 2])
@pytest.mark.parametrize("key", ["tokens", "test"])
def test_a_comparison_says_what_its_runs_do(added, arm, key):
    def apply(data):
        number = "training" if key == "tokens" else "n"
        data["arms"][arm][key][number] += 1

    change(added / "compare/compare.json", apply)
    (text,) = verify(added).damage
    assert f"its arm {('guess', 'random', 'evolved')[arm]} is not as" in text


def test_differences_follow_from_the_arms(added):
    change(
        added / "compare/compare.json", lambda data: data["differences"][0].update(difference=1.0)
    )
    (text,) = verify(added).damage
    assert "its differences do not follow from the tests of its arms" in text


def test_a_comparison_names_its_arms(added):
    change(added / "compare/compare.json", lambda data: data["arms"].pop(0))
    (text,) = verify(added).damage
    assert "expected guess, random and evolved, got ['random', 'evolved']" in text
    change(added / "compare/compare.json", lambda data: data.pop("arms"))
    (text,) = verify(added).damage
    assert "but arms: field required" in text


def test_an_arm_says_which_tokens_it_was_to_have(added):
    file = added / "compare/guess/population.yaml"
    file.write_text(file.read_text().partition("\n")[2])
    (text,) = verify(added).damage
    assert "expected '# Without evolution, beside the run two folders above it; " in text


def test_a_comparison_that_was_stopped_is_noted(added):
    (added / "compare/compare.json").unlink()
    shutil.rmtree(added / "compare/random")
    (added / "compare/guess/summary.json").unlink()
    found = verify(added)
    assert found.damage == []
    assert f"evo-grpo resume {added} --compare" in "\n".join(found.notes)
    compare(added)
    assert verify(added).damage == verify(added).notes == []


def test_a_comparison_that_is_trained_again_has_no_result_meanwhile(added):
    """Else a stop would leave the result of populations that are not trained."""
    with pytest.raises(KeyboardInterrupt):
        compare(added, force=True, observer=Told(("learn", 0)))
    assert read_comparison(added) is None
    assert verify(added).damage == []


def test_a_replay_of_another_schedule_is_damage(added):
    change(
        added / "replay/replay.json",
        lambda data: data["schedule"].update(run_tokens=1),
    )
    (text,) = verify(added).damage
    assert "its schedule is not that of the run's winner" in text


def test_a_replay_without_digests_is_damage(added):
    change(added / "replay/replay.json", lambda data: data.pop("files"))
    (text,) = verify(added).damage
    assert all(name in text for name in REPLAYED)


def test_what_was_added_to_an_earlier_end_is_looked_at(added):
    resume(added, rounds=4)
    found = verify(added)
    assert found.damage == found.notes == []
    flip(added / "replay.rounds-3" / REPLAYED[0] / "optimizer.safetensors")
    flip(added / "compare.rounds-3/guess/checkpoints/round-0000/agent-00/optimizer.safetensors")
    change(
        added / "compare.rounds-3/compare.json", lambda data: data["arms"][2]["test"].update(n=1)
    )
    damage = "\n".join(verify(added).damage)
    for name in ("replay.rounds-3", "compare.rounds-3/guess", "its arm evolved is not as"):
        assert name in damage
