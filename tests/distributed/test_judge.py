"""A judge that answers differently from call to call, and several ranks."""

import json

from judge_server import judging, says
from rank_runs import evo, together, written

from evo_grpo.analysis.verify import verify


def answer(body, number):
    return 200, says(f"<score>{number % 11}</score>")


def test_ranks_ask_each_question_once_so_that_equal_agents_get_equal_fitness(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with judging(answer) as server:
        prompt = "{prompt}{completion} <score>"
        reward = {"kind": "judge", "url": server.url, "model": "j", "prompt": prompt}
        path = written(
            tmp_path,
            env={"kind": "sums", "args": {"high": 20}, "reward": reward},
            population={"size": 2, "rounds": 2, "steps_per_round": 1, "sizes": "constant"},
            algorithm={"group_size": 2, "prompts_per_step": 2, "lr": 1e-9},
            evolve={"exploration": "none", "fitness": {"prompts": 16, "test_prompts": 4}},
        )
        together(2, *evo("run", path, "--out", tmp_path / "run")[2:])
        paid = list(server.paid)
    assert len(paid) == len(set(paid))
    for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines():
        one, two = (agent["score"]["per_prompt"] for agent in json.loads(line)["agents"])
        assert one == two
    files = sorted((tmp_path / "run" / "judge").iterdir())
    assert [file.name for file in files] == [f"judge-0-rank-{n}.jsonl" for n in range(2)]
    lines = [line for file in files for line in file.read_text().splitlines()]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["judge"]["answers"] == len(lines) == len(paid)
    assert verify(tmp_path / "run").damage == []
    # What was paid for is checked as all else of a run.
    files[0].write_text(files[0].read_text().replace("<score>", "<Score>", 1))
    files[1].unlink()
    changed, missing = verify(tmp_path / "run").damage
    assert "1 answer of the judge changed" in changed
    assert f"expected the {len(paid)} answers of the judge that summary.json counts" in missing
