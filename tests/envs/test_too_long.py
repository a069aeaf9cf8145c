"""Rows whose prompts leave no room for a completion: refused, left out, or cut at the beginning."""

import json

import pytest
from small_run import small
from transformers import AutoTokenizer

from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.cli.plan.render import _rows
from evo_grpo.envs.describing import environment_parts
from evo_grpo.envs.registry import build_task
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import DataError, PromptTooLongError
from evo_grpo.settings import EnvConfig
from evo_grpo.sources import embedded_models
from evo_grpo.training.assemble import prepare

CONTEXT = 20
LONG = {4, 11, 25}
ROWS = [{"question": f"{n:03d}" + "+1" * (20 if n in LONG else 1) + "="} for n in range(30)]


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each character, without further tokens."""
    return AutoTokenizer.from_pretrained(embedded_models()["tiny-sums"])


def gym(tokenizer, rows=ROWS, **settings):
    env = EnvConfig(
        kind="dataset", train=rows, validation=rows, test=rows, reward=lambda completion: 1.0,
        **settings,
    )  # fmt: skip
    return ReasoningGym.from_task(build_task(env, 0), tokenizer)


def test_the_default_refuses_the_first_of_them(tokenizer):
    with pytest.raises(PromptTooLongError, match=r"at most 19 tokens.*set env.too_long"):
        gym(tokenizer).limit_context(CONTEXT)


def test_rows_that_are_dropped_are_in_no_split_and_are_counted(tokenizer):
    env = gym(tokenizer, too_long="drop")
    with pytest.warns(UserWarning, match=r"9 of 90 rows are left out, .* more than 19 tokens"):
        env.limit_context(CONTEXT)
    short = {row["question"] for n, row in enumerate(ROWS) if n not in LONG}
    for split in ("train", "validation", "test"):
        assert {one.text for one in env.prompts(split)} == short
    assert {one.text for step in range(5) for one in env.batch(step, 6)} <= short
    assert env.row("train", 4).text == ROWS[5]["question"]
    env.limit_context(CONTEXT)  # nothing more to leave out: no warning


@pytest.mark.filterwarnings("ignore:env.too_long")
def test_an_environment_for_another_context_has_its_rows_again(tokenizer):
    env = gym(tokenizer, too_long="drop")
    steps = [[one.text for one in gym(tokenizer).batch(step)] for step in range(4)]
    parts = environment_parts(env, 0)
    env.limit_context(CONTEXT)
    assert environment_parts(env, 0) == parts, "a run is recorded with the rows that were given"
    env.limit_context(100)
    assert [[one.text for one in env.batch(step)] for step in range(4)] == steps
    assert environment_parts(gym(tokenizer, too_long="truncate_left"), 0) != parts


def test_a_row_is_dropped_where_one_of_several_prompts_is_too_long(tokenizer):
    rows = [{"question": "1+1="}, {"question": "1" * 14}, *({"question": f"{n}"} for n in range(9))]
    prompts = {"plain": {"prompt": "{question}"}, "longer": {"prompt": "000000{question}"}}
    env = gym(tokenizer, rows, too_long="drop", prompts=prompts)
    with pytest.warns(UserWarning, match="3 of 33 rows"):
        env.limit_context(CONTEXT)
    assert "1" * 14 not in {one.text for one in env.prompts("train")}


def test_no_row_that_fits_is_an_error(tokenizer):
    env = gym(tokenizer, too_long="drop")
    with pytest.raises(DataError, match="expected a train row with a prompt of at most 3 tokens, "):
        env.limit_context(4)


@pytest.mark.parametrize(("context", "answer", "kept"), [(20, 6, 14), (20, None, 1), (10, 30, 1)])
def test_a_prompt_that_is_cut_keeps_its_end_and_leaves_room(tokenizer, context, answer, kept):
    env = gym(tokenizer, too_long="truncate_left")
    env.limit_context(context, answer)
    prompt = env.row("train", 4)
    whole = tokenizer(ROWS[4]["question"])["input_ids"]
    assert list(prompt.token_ids) == whole[-kept:]
    assert prompt.text == tokenizer.decode(whole[-kept:])
    assert prompt.columns == env.task.splits["train"][4]
    assert env.row("train", 5).text == ROWS[5]["question"]
    env.limit_context(100, answer)
    assert env.row("train", 4).text == ROWS[4]["question"]


@pytest.fixture
def settings(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "too_long_reward.py").write_text("def score(completion):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(too_long):
        env = {"kind": "dataset", "train": "rows.jsonl", "prompt": "{question}"}
        env |= {"reward": "too_long_reward:score", "too_long": too_long}
        return small(env=env, algorithm__max_model_len=CONTEXT, algorithm__max_output_tokens=4)

    return make


def test_check_counts_what_a_run_leaves_out_or_cuts(settings, tmp_path):
    plan = make_plan(settings("drop"))
    assert sum(plan.rows.values()) == 27
    texts = [text for _, text in _rows(plan)]
    assert "3 rows with a prompt too long for the context: left out" in texts
    with pytest.warns(UserWarning, match="3 of 30 rows are left out"):
        env = prepare(settings("drop")).env
    assert plan.rows == {split: len(rows) for split, rows in env.task.splits.items()}
    assert plan.prompts.most <= CONTEXT - 1
    assert plan.prompts.different == plan.rows
    cut_plan = make_plan(settings("truncate_left"))
    assert cut_plan.prompts.most == CONTEXT - 4
    texts = [text for _, text in _rows(cut_plan)]
    assert "3 rows with a prompt too long for the context: cut at the beginning" in texts
    cut = prepare(settings("truncate_left")).env
    lengths = [len(one.token_ids) for split in cut.task.splits for one in cut.prompts(split)]
    assert sorted(lengths)[-3:] == [16, 16, 16]
