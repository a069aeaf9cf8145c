"""The best agent as a PEFT folder: loadable by others, and a card that says where it comes from."""

import ast
import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from damage import cut, empty, flip, folder_instead
from peft import PeftModel
from safetensors.torch import load_file, save_file
from shown_run import candidate
from small_run import edited, small
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from evo_grpo import run, sources
from evo_grpo.analysis.export.export import export
from evo_grpo.cli.commands import app
from evo_grpo.errors import (
    CheckpointError,
    ConfigError,
    RunDirError,
    RunFailedError,
)
from evo_grpo.escaping import printable
from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.leaderboard import leaderboard
from evo_grpo.record.summary import read_summary
from evo_grpo.sources import resolve
from evo_grpo.training.assemble import prepare

BASE = {
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
}
FILES = {
    *("README.md", "adapter_config.json", "adapter_model.safetensors", "export.json"),
    *("tokenizer.json", "tokenizer_config.json"),
    *(f"base/{name}" for name in BASE),
}
"""Of an export over an embedded base."""
whole = {name.partition("/")[0] for name in FILES}


def files_of(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = small(algorithm__lr=1e-2, evolve__hyperparameters={"lr": {"min": 5e-3, "max": 2e-2}})
    return run(config, out=tmp_path_factory.mktemp("runs") / "sums-1")


def with_gain(folder, gain):
    """The run with a winner whose reward on each test prompt is about `gain` above the base's."""
    summary = json.loads((folder / "summary.json").read_text())
    base = summary["base"]["per_prompt"]
    best = [reward + gain + 0.01 * (-1) ** n for n, reward in enumerate(base)]
    summary["best"] |= {"per_prompt": best, "mean": sum(best) / len(best)}
    summary |= {"gain": gain, "gain_se": 0.01 * 2**0.5 / len(best) ** 0.5}
    summary.pop("sha256", None)
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_winner_that_is_worse_than_the_base_is_exported_only_anyway(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    with_gain(folder, -0.2)
    winner = read_summary(folder)["best"]["agent"]
    for named in ({}, {"agent": winner}):
        with pytest.raises(ConfigError, match=r"got a loss of -0\.2000 ± .* interval .*--anyway"):
            export(folder, tmp_path / "out", **named)
    assert not (tmp_path / "out").exists()
    card = (export(folder, tmp_path / "out", anyway=True) / "README.md").read_text()
    assert "- **worse than the base model**: -0.2000" in card
    # An agent that was not judged is not known to be worse.
    other = next(a.agent for a in read_rounds(folder)[-1].agents if a.agent != winner)
    export(folder, tmp_path / "other", agent=other)
    shown = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "cli")])
    assert (shown.exit_code, "--anyway" in shown.stderr) == (2, True)
    shown = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "cli"), "--anyway"])
    assert shown.exit_code == 0
    with_gain(folder, -0.001)  # may be chance
    export(folder, tmp_path / "chance")


def test_peft_loads_it_over_the_plain_base_to_the_agents_own_logits(finished, tmp_path):
    out = export(finished, tmp_path / "best")
    assert out == tmp_path / "best"
    assert files_of(out) == FILES
    best = leaderboard(finished).iloc[0]
    prepared = prepare(small())
    load_agent(prepared.cohort, 0, finished / best["checkpoint"])
    prepared.cohort.slots.activate("actor_0")
    folder = resolve("tiny-sums").path
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(["12+07=", "99+01="])["input_ids"])
    with torch.no_grad():
        own = prepared.cohort.slots.peft(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(folder)
        without = base(input_ids=ids).logits
        for adapter in (out, finished / best["checkpoint"] / "actor"):
            model = AutoModelForCausalLM.from_pretrained(folder)
            loaded = PeftModel.from_pretrained(model, str(adapter)).eval()(input_ids=ids).logits
            assert (own - loaded).abs().max() < 1e-5
    assert (own - without).abs().max() > 1e-3


def test_the_card_names_run_lineage_and_schedule(finished, tmp_path):
    card = (export(finished, tmp_path / "best") / "README.md").read_text()
    best, summary = leaderboard(finished).iloc[0], read_summary(finished)
    assert card.startswith("---\nlibrary_name: peft\n")
    assert f"# sums-1: agent {best['agent']}, member {best['member']}" in card
    assert "trained on `sums` by the evo-grpo run `sums-1`" in card
    assert f"validation fitness: {best['fitness']:.4f}" in card
    assert f"test split, judged once: {summary['best']['mean']:.4f}" in card
    assert f"base model {summary['base']['mean']:.4f}" in card
    rows = [line.split("|")[1:-1] for line in card.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip() for row in rows] == ["1", "2", "3"]
    assert rows[-1][1].strip() == str(best["member"])
    assert rows[-1][4].strip() == f"{best['lr']:.3g}"
    assert rows[0][2].strip() == "init"


def test_the_cards_code_is_python_that_runs(finished, tmp_path, monkeypatch):
    out = export(finished, tmp_path / "best")
    code = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(out)
    names = {}
    exec(compile(code, "card", "exec"), names)
    assert isinstance(names["model"], PeftModel)


def contents_of(folder):
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


def with_files(files):
    def plant(finished, out):
        for name, text in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text)

    return plant


def added_to(name):
    """Write into a file of an export, or beside its files."""

    def plant(finished, out):
        with (export(finished, out) / name).open("a") as file:
            file.write("mine")

    return plant


def linked_base(finished, out):
    for folder in (out, out.with_name("elsewhere")):
        folder.mkdir()
    (out / "base").symlink_to(out.with_name("elsewhere"))


MINE = dict.fromkeys(("mine.txt", "base/mine.txt", "../mine.txt"), "mine")
STRANGE = "which is not as an export wrote it"


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        *((with_files({n: "mine"}), f"found {n}, {STRANGE}") for n in ("mine.txt", "README.md")),
        (added_to("base/mine.txt"), f"found base/mine.txt, {STRANGE}"),
        (added_to("README.md"), f"found README.md, {STRANGE}"),
        (lambda finished, out: out.write_text(""), "expected a folder, found a file"),
        (linked_base, "an earlier export to replace, found base"),
        *(
            (with_files(MINE | {"export.json": json.dumps({"files": names})}), STRANGE)
            for names in (
                *(["mine.txt"], {"mine.txt": "", "base/mine.txt": ""}),
                *({"../mine.txt": ""}, "x", None),
            )
        ),
    ],
)
def test_force_replaces_nothing_that_no_export_wrote(finished, tmp_path, plant, named):
    plant(finished, tmp_path / "out")
    before = contents_of(tmp_path)
    with pytest.raises(RunDirError, match=named):
        export(finished, tmp_path / "out", force=True)
    assert contents_of(tmp_path) == before


def exported_digest(folder):
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


def rewritten(folder, **changes):
    """Change what summary.json says of the winner, and of the candidates."""
    summary = read_summary(folder)
    for name in ("candidates", "files"):
        summary[name] = changes.pop(name, summary[name])
    summary["best"] |= changes
    (folder / "summary.json").write_text(json.dumps(summary))


def with_other_weights(source, target, factor):
    """Copy a checkpoint and change its weights; returns the digests of its adapter's files."""
    shutil.copytree(source, target)
    file = target / "actor" / "adapter_model.safetensors"
    save_file({name: factor * t for name, t in load_file(file).items()}, file)
    return {
        f"checkpoints/{target.name}/actor/{one.name}": hashlib.sha256(one.read_bytes()).hexdigest()
        for one in (target / "actor").iterdir()
    }


def test_a_mean_is_exported_with_both_parents_and_its_ties(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    rounds = read_rounds(folder)
    first, second = rounds[-1].agents[:2]
    files = with_other_weights(folder / first.checkpoint, folder / "checkpoints" / "mean", 0.5)
    parents = [first.member, second.member]
    rewritten(
        folder,
        kind="mean",
        agent=None,
        member=99,
        parents=parents,
        fitness=None,
        checkpoint="checkpoints/mean",
        files=files,
        candidates=[
            candidate("last", first.agent, first.member, [], 0.7, tie=True),
            candidate("mean", None, 99, parents, 0.72),
        ],
    )
    card = (export(folder, tmp_path / "best") / "README.md").read_text()
    assert f"the mean of agents {first.agent} and {second.agent}, member 99" in card
    assert f"- kind: mean of the adapters of members {parents[0]} and {parents[1]}" in card
    assert f"0.7200 ± 0.0300 against 0.70 (agent {first.agent}, a tie)" in card
    assert "- tie: it is not shown to be ahead of those marked so" in card
    assert "validation fitness" not in card
    for member in parents:
        assert f"Of member {member}:" in card
    assert exported_digest(tmp_path / "best") in card
    exported = load_file(tmp_path / "best" / "adapter_model.safetensors")
    saved = load_file(folder / "checkpoints/mean/actor/adapter_model.safetensors")
    assert all(torch.equal(exported[name], saved[name]) for name in saved)


ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


def linked(file):
    moved = file.with_name("moved")
    file.rename(moved)
    file.symlink_to(moved)


@pytest.mark.parametrize(
    ("place", "damage", "name", "force"),
    [
        *(("actor", one, ADAPTER_FILES[0], False) for one in (cut, empty, os.unlink)),
        *(("actor", one, ADAPTER_FILES[1], False) for one in (flip, empty, os.unlink, linked)),
        ("actor", folder_instead, ADAPTER_FILES[0], False),
        *(("actor", flip, name, True) for name in ADAPTER_FILES),
        ("base", cut, "model.safetensors", False),
        ("base", folder_instead, "tokenizer.json", False),
        ("base", os.unlink, "tokenizer_config.json", False),
        ("base", flip, "config.json", True),
    ],
)
def test_a_damaged_adapter_base_or_tokenizer_is_never_exported(
    finished, tmp_path, monkeypatch, place, damage, name, force
):
    folder, out = shutil.copytree(finished, tmp_path / "run"), tmp_path / "best"
    base = shutil.copytree(resolve("tiny-sums").path, tmp_path / "tiny-sums")
    before = contents_of(export(folder, out)) if force else {}
    actor = folder / read_summary(folder)["best"]["checkpoint"] / "actor"
    damage({"actor": actor, "base": base}[place] / name)
    monkeypatch.setattr(sources, "embedded_models", lambda: {"tiny-sums": base})
    with pytest.raises((CheckpointError, RunDirError, OSError), match=name):
        export(folder, out, force=force)
    assert contents_of(out) == before
    assert {p.name for p in tmp_path.iterdir()} == {"run", base.name, *(["best"] * force)}


def test_only_the_adapters_own_files_are_exported(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    actor = folder / read_summary(folder)["best"]["checkpoint"] / "actor"
    (actor / "planted").symlink_to(secret)
    (actor / "note.txt").write_text("note")
    out = export(folder, tmp_path / "best")
    assert files_of(out) == FILES


@pytest.mark.parametrize("checkpoint", ["../outside", "/etc", "checkpoints/../../outside", ""])
def test_a_winner_outside_of_the_folder_is_refused(finished, tmp_path, checkpoint):
    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(folder / read_summary(folder)["best"]["checkpoint"], tmp_path / "outside")
    rewritten(folder, checkpoint=checkpoint)
    with pytest.raises(CheckpointError, match=r"summary.json: .*expected a path below the folder"):
        export(folder, tmp_path / "best")


def test_a_winner_behind_a_link_is_refused(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "checkpoints").rename(tmp_path / "outside")
    (folder / "checkpoints").symlink_to(tmp_path / "outside")
    with pytest.raises(RunDirError, match=r"checkpoints: expected .* got a link to"):
        export(folder, tmp_path / "best")


def another_export(out):
    """What an export of a merged model leaves, with files of other names."""
    out.mkdir()
    names = ("config.json", "model-00001-of-00002.safetensors", "README.md")
    written = dict.fromkeys(names, hashlib.sha256(b"earlier").hexdigest())
    for name in written:
        (out / name).write_text("earlier")
    (out / "export.json").write_text(json.dumps({"files": written}))


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nothing", "an empty folder", "an export", "another export"])
def test_a_full_disk_leaves_no_half_of_an_export(finished, tmp_path, monkeypatch, before):
    """Each write, sync, rename and mkdir fails in turn; the rest is whole, or does not load."""
    make = {"an empty folder": Path.mkdir, "another export": another_export}
    make["an export"] = lambda out: export(finished, out)
    for full_at in range(1, 100):
        out, force = tmp_path / str(full_at) / "best", before.endswith("export")
        out.parent.mkdir()
        if before in make:
            make[before](out)
        earlier = files_of(out) if out.exists() else set()
        calls = []

        def failing(real, calls=calls, full_at=full_at):
            def call(*arguments, **given):
                calls.append(real)
                if len(calls) == full_at:
                    raise OSError(28, "No space left on device")
                return real(*arguments, **given)

            return call

        steps = ((Path, "write_bytes"), (os, "fsync"), (Path, "rename"), (Path, "mkdir"))
        for owner, name in steps:
            monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
        with contextlib.suppress(RunFailedError):
            export(finished, out, force=force)
        monkeypatch.undo()
        left = files_of(out) if out.exists() else set()
        # Until the first file is moved, an earlier export is still there.
        assert left in (earlier, FILES) or not {"config.json", "adapter_config.json"} & left
        assert {p.name for p in out.parent.iterdir()} <= {"best"}
        if len(calls) < full_at:
            break
        export(finished, out, force=True)
        assert files_of(out) == FILES
    assert left == FILES
    assert full_at > 20


@pytest.fixture
def nothing_beside(tmp_path, monkeypatch):
    """Let nothing be made in tmp_path: OUT is a mount point, or the folder above is not ours."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best").mkdir()
    made = Path.mkdir

    def mkdir(self, *arguments, **given):
        if self.absolute().parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(self))
        return made(self, *arguments, **given)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    return tmp_path / "best"


@pytest.mark.parametrize("out", ["best", ".", "../best", "link"])
def test_an_empty_folder_is_written_into_whatever_it_is_called(
    finished, nothing_beside, monkeypatch, out
):
    if out in (".", "../best"):
        monkeypatch.chdir(nothing_beside)
    if out == "link":
        Path("link").symlink_to("best")
    assert export(finished, out) == Path(out)
    assert {p.name for p in nothing_beside.iterdir()} == whole
    with pytest.raises(RunDirError, match=rf"^{out}: is not empty; choose another OUT.*--force"):
        export(finished, out)
    export(finished, out, force=True)
    assert {p.name for p in nothing_beside.iterdir()} == whole
    assert not Path("link").exists() or Path("link").is_symlink()


def test_a_place_that_cannot_be_written_is_named(finished, nothing_beside):
    with pytest.raises(RunFailedError, match=r"^other: cannot be written \(Permission denied\)"):
        export(finished, "other")
    with pytest.raises(RunFailedError, match=r"^a+: cannot be written \(File name too long\)"):
        export(finished, "a" * 300)


def test_what_a_kill_left_is_cleared_and_no_link_is_written_through(finished, tmp_path):
    out, foreign = tmp_path / "best", tmp_path / "foreign"
    for name in ("best/.evo-grpo-export-1", "foreign"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "README.md").write_text("half")
    (out / ".evo-grpo-export-3").symlink_to(foreign)
    export(finished, out)
    assert {p.name for p in out.iterdir()} == whole
    shutil.copyfile(out / "README.md", foreign / "README.md")
    (out / "README.md").unlink()
    (out / "README.md").symlink_to(foreign / "README.md")
    (foreign / "README.md").chmod(0o444)
    export(finished, out, force=True)
    assert {p.name for p in out.iterdir()} == whole
    assert not (out / "README.md").is_symlink()
    assert (foreign / "README.md").is_file()


@pytest.mark.parametrize(
    "name",
    [
        'x"); import os; os.system("true"\nlicense: mit',
        "x\n---\nlicense: mit",
        "a `b` ``c``: #\u2028---",
        "a " * 2000 + "b",
    ],
)
def test_the_card_quotes_what_a_configuration_says(finished, tmp_path, name):
    folder = shutil.copytree(finished, tmp_path / "run")
    edited(folder, model__name=name)
    with pytest.warns(UserWarning, match="has no tokenizer, because its base is not found"):
        out = export(folder, tmp_path / "best")
    card = (out / "README.md").read_text()
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == name
    front = yaml.safe_load(card.split("---\n")[1])
    assert set(front) == {"library_name", "tags"}
    assert card.count("\n---\n") == 1
    (said,) = [line for line in card.split("\n") if line.startswith("A LoRA adapter over `")]
    assert printable(name) in said
    fence = said.removeprefix("A LoRA adapter over ").partition("x" if "x" in name else "a")[0]
    assert fence.strip() not in name
    for code in card.split("```python\n")[1:]:
        parsed = ast.parse(code.split("```")[0])
        assert name in [a.value for a in ast.walk(parsed) if isinstance(a, ast.Constant)]


def test_the_name_of_a_run_is_text_in_the_card_and_no_more(finished, tmp_path):
    name = "a\n# b\x1b[2J <b> `c` [d](e) _f_ g_h \u202e| &amp;"
    folder = shutil.copytree(finished, tmp_path / name)
    card = (export(folder, tmp_path / "best") / "README.md").read_text()
    assert all(printable(line) == line for line in card.splitlines())
    assert [line for line in card.splitlines() if line.startswith("# ")] == [
        next(line for line in card.splitlines() if line.startswith("# a\\\\n\\# b"))
    ]
    title = r"\\x1b\[2J \<b\> \`c\` \[d\](e) \_f\_ g_h \\u202e\| \&amp;: agent "
    assert title in card
    assert f"the evo-grpo run `` {printable(name)} `` and selected" in card
