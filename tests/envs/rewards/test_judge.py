"""A judge on the loopback: scores, failures, and answers that are paid for once."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from judge_server import by_digits, judging, says, score_of

from evo_grpo.envs.rewards import judge_client
from evo_grpo.envs.rewards.functions import UnusableRewardError
from evo_grpo.envs.rewards.scorers import Judge, read_score
from evo_grpo.envs.rewards.watch import in_a_thread
from evo_grpo.errors import ConfigError, RewardError
from evo_grpo.settings.rewards import JudgeReward

PROMPT = "Q: {question} A: {completion} Answer with <score>0 to 10</score>"
KEY = "sk-very-secret-key"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(judge_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", KEY)


def made(url, **settings):
    return Judge(JudgeReward(**{"url": url, "model": "m", "prompt": PROMPT, **settings}))


def ask(judge, completions):
    return judge(
        completions=completions,
        prompts=["p"] * len(completions),
        question=[f"q{number % 7}" for number in range(len(completions))],
    )


def slow(completions):
    """The rewards of `by_digits`, one after another."""
    made_of = [PROMPT.format(question=f"q{n % 7}", completion=c) for n, c in enumerate(completions)]
    return [score_of(text) / 10 for text in made_of]


def test_answers_equal_those_of_one_request_after_another():
    completions = [f"{number * 37}" for number in range(40)]
    with judging(by_digits) as server:
        judge = made(server.url, concurrency=5, input_price=2.0, output_price=30.0)
        assert ask(judge, completions) == pytest.approx(slow(completions))
        assert server.most <= 5
        asked = server.requests
        assert ask(judge, completions[:3] * 2)[:3] == pytest.approx(slow(completions)[:3])
        assert judge.spent() == {
            "answers": float(server.requests),
            "input_tokens": 100.0 * server.requests,
            "output_tokens": 10.0 * server.requests,
            "cost": pytest.approx(server.requests * (100 * 2 + 10 * 30) / 1e6),
        }
        assert asked == 40
    assert server.keys == [None] * server.requests


def test_threads_that_ask_at_once_share_the_limit_and_ask_each_question_once():
    completions = [[f"{number * 37}" for number in range(first, first + 20)] for first in (0, 7)]

    def waits(body, number):
        time.sleep(0.02)
        return by_digits(body)

    with judging(waits) as server:
        judge = made(server.url, concurrency=4)
        parts = [in_a_thread("part", partial(ask, judge, mine)) for mine in completions]
        for part, mine in zip(parts, completions, strict=True):
            assert part.result(20) == pytest.approx(slow(mine))
        assert 2 < server.most <= 4
        # The questions of the second part depend on the place of a completion.
        assert server.requests == len(set(server.paid)) <= 40


def test_a_thread_goes_on_where_another_one_has_failed_to_ask():
    asked = []

    def fails_first(body, number):
        asked.append(number)
        time.sleep(0.2)
        return (400, {}) if number == 1 else by_digits(body)

    with judging(fails_first) as server:
        judge = made(server.url, retries=0)
        parts = [in_a_thread("part", partial(ask, judge, ["7"])) for _ in range(2)]
        found = [part.result(20)[0] for part in parts]
    kinds = sorted(type(one).__name__ for one in found)
    assert kinds == ["RewardError", "float"]
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<score>7</score>", 0.7),
        ("<score>2</score> no, <score> 10.0 </score>.", 1.0),
        ("<score>11</score>", None),
        ("<score>nan</score>", None),
        ("<score>seven</score>", None),
        ("</score><score>", None),
        ("<score>" * 100_000, None),
        (None, None),
    ],
)
def test_the_last_tag_is_the_score(text, score):
    settings = JudgeReward(url="http://h/v1", model="m", prompt=PROMPT)
    assert read_score(settings, says(text))[0] == score


def likeliest(**logprobs):
    tokens = [{"token": name, "logprob": math.log(p)} for name, p in logprobs.items()]
    return {"choices": [{"message": {}, "logprobs": {"content": [{"top_logprobs": tokens}]}}]}


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (likeliest(yes=0.3, Yes=0.3, No=0.2, maybe=0.2), 0.75),
        (likeliest(No=0.9), 0.0),
        (likeliest(Yes=0.2, No=0.2, I=0.6), None),
        (likeliest(), None),
        ({"choices": [{"logprobs": {"content": [{"top_logprobs": [3, {"token": []}]}]}}]}, None),
        ({"choices": [3]}, None),
        ({"choices": []}, None),
    ],
)
def test_the_score_by_log_probs_is_the_mean_by_probability(reply, score):
    settings = JudgeReward(url="http://h/v1", model="m", prompt="{completion}", score="logprob")
    assert read_score(settings, reply)[0] == (None if score is None else pytest.approx(score))


def test_log_probs_are_asked_for_and_parameters_replace_fields():
    seen = []

    def answer(body, number):
        seen.append(body)
        return 200, likeliest(yes=0.6, no=0.4)

    with judging(answer) as server:
        given = {"temperature": None, "seed": 3}
        judge = made(server.url, score="logprob", prompt="{completion}", parameters=given)
        assert ask(judge, ["x"]) == pytest.approx([0.6])
    assert seen[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 20,
        "seed": 3,
    }


def test_failures_are_tried_again():
    def answer(body, number):
        broken = {1: (500, b"oops"), 2: (429, b"slow down"), 3: (200, b"not JSON"), 4: (200, {})}
        return broken.get(number) or by_digits(body)

    with judging(answer) as server:
        server.headers["Retry-After"] = "0.01"
        assert ask(made(server.url, concurrency=1, retries=4), ["a1"]) == slow(["a1"])
        assert server.requests == 5


def test_a_request_that_stays_without_an_answer_is_an_error_of_its_completion_alone():
    def answer(body, number):
        if "bad" in body["messages"][0]["content"]:
            return 400, {"error": "content filter"}
        return by_digits(body)

    with judging(answer) as server:
        completions = ["bad", *map(str, range(20))]
        first, *others = ask(made(server.url), completions)
        assert others == pytest.approx(slow(completions)[1:])
        assert isinstance(first, RewardError)
        assert "status 400" in str(first)
        assert "content filter" in str(first)


def test_an_api_that_is_down_is_not_asked_for_every_completion():
    with judging(lambda body, number: (503, b"down")) as server:
        found = ask(made(server.url, retries=1, concurrency=2), list(map(str, range(50))))
        assert server.requests <= 6
    assert all("status 503" in str(one) for one in found)
    assert "in 2 attempts" in str(found[0])


def test_a_slow_judge_is_given_up_after_the_time_out():
    with judging(lambda body, number: (0, None)) as server:
        begun = time.monotonic()
        (found,) = ask(made(server.url, timeout=0.2, retries=1), ["x"])
        assert time.monotonic() - begun < 5
    assert "no answer within 0.2 s in 2 attempts" in str(found)


def test_nonsense_is_unusable_and_not_paid_for_again():
    with judging(lambda body, number: (200, says("I cannot say."))) as server:
        judge = made(server.url)
        for _ in range(2):
            (found,) = ask(judge, ["x"])
            assert isinstance(found, UnusableRewardError)
            assert "expected <score>number from 0 to 10</score>, got 'I cannot say.'" in str(found)
        assert server.requests == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_the_run_and_is_never_shown(status, caplog):
    caplog.set_level("DEBUG")

    def answer(body, number):
        return status, {"error": f"Incorrect API key {KEY}"}

    with judging(answer) as server:
        judge = made(server.url, key_variable="JUDGE_KEY")
        with pytest.raises(RewardError, match="environment variable JUDGE_KEY") as caught:
            ask(judge, ["x"])
        assert server.keys == [f"Bearer {KEY}"]
        with pytest.raises(RewardError, match="sends none: name it in key_variable"):
            ask(made(server.url), ["x"])
    # A server that repeats the key elsewhere does not spread it either.
    with judging(lambda body, number: (400, f"{KEY}?".encode())) as server:
        (found,) = ask(made(server.url, key_variable="JUDGE_KEY"), ["x"])
    shown = f"{caught.value} {caught.value.__context__!r} {found} {caplog.text}"
    assert "***?" in shown
    assert KEY not in shown


@pytest.mark.parametrize("key", [KEY, "sk-\"a/very\\secret'-key"])
@pytest.mark.parametrize("before", [*range(170, 201, 6), *range(1982, 2000, 6)])
def test_no_part_of_the_key_is_shown_or_kept_where_a_text_is_cut(
    tmp_path, monkeypatch, key, before
):
    monkeypatch.setenv("JUDGE_KEY", key)
    where = [key, json.dumps(key)[1:-1], json.dumps(key)[1:-1].replace("/", "\\/")]

    def answer(body, number):
        text = "x" * before + where[number % 3] + "y" * 490
        return (400, text.encode()) if number <= 3 else (200, says(text))

    with judging(answer) as server:
        judge = made(server.url, key_variable="JUDGE_KEY", retries=0)
        judge.record_in(tmp_path, "judge")
        shown = "".join(str(one) for n in range(6) for one in ask(judge, [str(n)]))
    assert server.requests == 6
    kept = (tmp_path / "judge.jsonl").read_text()
    for text in (shown, kept):
        assert "***" in text or before > 200
        assert "secret" not in text
        assert "sk-" not in text
        assert "-key" not in text


def test_a_key_that_is_missing_or_broken_is_refused_before_anything_is_sent(monkeypatch):
    judge = made("http://127.0.0.1:1/v1", key_variable="JUDGE_KEY")
    judge.prepare("cpu")
    monkeypatch.setenv("JUDGE_KEY", "a\nb")
    with pytest.raises(ConfigError, match="of printable ASCII characters, got others"):
        judge.prepare("cpu")
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"JUDGE_KEY, .* got none; set it: export JUDGE_KEY"):
        judge.prepare("cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTPS_PROXY", "ftp://me:secret@127.0.0.1"),
        ("ALL_PROXY", "http://[::bad"),
        ("SSL_CERT_FILE", "/no/such/file"),
        ("SSL_CERT_FILE", __file__),
    ],
)
def test_a_proxy_or_certificates_that_cannot_be_used_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    judge = made("https://127.0.0.1:1/v1")
    with pytest.raises(
        ConfigError, match=rf"no connection to https.*correct or unset.*{name}"
    ) as e:
        judge.prepare("cpu")
    assert "secret" not in str(e.value)


def test_a_reply_without_an_end_is_cut_and_a_redirect_is_not_followed():
    with judging(lambda body, number: (200, b"x" * (judge_client.MOST_BYTES + 1))) as server:
        (found,) = ask(made(server.url), ["x"])
    assert "more than 4,194,304 bytes" in str(found)
    with judging(lambda body, number: (307, b"")) as server:
        server.headers["Location"] = server.url + "/other"
        with pytest.raises(RewardError, match="status 307"):
            ask(made(server.url, key_variable="JUDGE_KEY"), ["x"])
        assert server.requests == 1


def test_it_works_inside_an_event_loop():
    async def cell(url):
        return ask(made(url), ["a1"])

    with judging(by_digits) as server:
        assert asyncio.run(cell(server.url)) == slow(["a1"])


SCRIPT = """
import json, sys
from pathlib import Path
from evo_grpo.envs.rewards import judge_client
from evo_grpo.envs.rewards.scorers import Judge
from evo_grpo.settings.rewards import JudgeReward
judge_client.FIRST_PAUSE = 0.01
url, prompt, folder = sys.argv[1:]
judge = Judge(JudgeReward(url=url, model="m", prompt=prompt, concurrency=4))
judge.record_in(Path(folder), "judge-0-rank-0")
texts = [f"{number * 37}" for number in range(200)]
columns = [f"q{number % 7}" for number in range(200)]
print(json.dumps(judge(completions=texts, prompts=texts, question=columns)))
"""


@pytest.mark.slow
def test_of_200_answers_with_a_tenth_failing_none_is_paid_for_twice_after_a_kill(tmp_path):
    held = True

    def answer(body, number):
        if held and number > 130:
            return 0, None  # nothing more is answered until the process is dead
        return (503, b"busy") if number % 10 == 0 else by_digits(body)

    def begin(url):
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, url, PROMPT, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )

    file = tmp_path / "judge-0-rank-0.jsonl"
    with judging(answer) as server:
        process = begin(server.url)
        # Four are held, so that none is under way; of the others, 13 failed.
        while server.requests < 134 or file.read_bytes().count(b"\n") < 117:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert len(server.paid) == 117
        with file.open("ab") as cut:
            cut.write(b'{"question": "cut off by the ki')
        held = False
        output, _ = begin(server.url).communicate()
        completions = [f"{number * 37}" for number in range(200)]
        assert json.loads(output) == pytest.approx(slow(completions))
        assert len(server.paid) == len(set(server.paid)) == 200
    judge = made(server.url)
    judge.record_in(tmp_path, "judge-0-rank-0")
    assert judge.spent()["answers"] == 200


class Shared(dict):
    """A board of two judges in threads of this process."""

    def swap(self, name, old, new):
        return self.setdefault(name, new) if old == "" else self._changed(name, old, new)

    def _changed(self, name, old, new):
        if self[name] == old:
            self[name] = new
        return self[name]

    def write(self, texts):
        self.update(texts)

    def read(self, names):
        return [self[name] for name in names]


def test_processes_that_share_a_board_ask_each_question_once():
    def answer(body, number):
        """An answer that differs from call to call."""
        time.sleep(0.01)
        return 200, says(f"<score>{number % 11}</score>")

    board = Shared()
    with judging(answer) as server:
        judges = [made(server.url, concurrency=4) for _ in range(3)]
        for judge in judges:
            judge.share(board, known=False)
        completions = [str(n) for n in range(30)]
        asked = [in_a_thread("ask", partial(ask, judge, completions)) for judge in judges]
        first, *others = [one.result() for one in asked]
        assert all(other == first for other in others)
        assert server.requests == 30
        assert sum(judge.spent()["answers"] for judge in judges) == 30


def test_a_process_hears_that_another_one_got_no_answer_and_may_ask_later():
    board, refuses = Shared(), True

    def answer(body, number):
        time.sleep(0.2)
        return (400, "no") if refuses else (200, says("<score>5</score>"))

    with judging(answer) as server:
        one, two = made(server.url), made(server.url)
        one.share(board, known=False)
        two.share(board, known=False)
        under_way = in_a_thread("ask", partial(ask, one, ["x"]))
        while server.requests == 0:
            time.sleep(0.01)
        (heard,) = ask(two, ["x"])
        assert server.requests == 1
        assert str(heard) == str(under_way.result()[0])
        refuses = False
        assert ask(two, ["x"]) == ask(one, ["x"]) == [0.5]
        assert server.requests == 2
    # A refused key ends a process: nobody waits for it.
    with judging(lambda body, number: (401, "no")) as server:
        one, two = made(server.url), made(server.url)
        one.share(board := Shared(), known=False)
        two.share(board, known=False)
        for judge in (one, two):
            with pytest.raises(RewardError, match="refused the key"):
                ask(judge, ["x"])


def test_all_files_of_a_judge_are_counted_by_one_process(tmp_path):
    with judging(by_digits) as server:
        for name in ("judge-0-rank-0", "judge-0-rank-1", "judge-1-rank-0"):
            judge = made(server.url)
            judge.record_in(tmp_path / name, name)
            ask(judge, [name[::2]])
            (tmp_path / f"{name}.jsonl").write_text((tmp_path / name / f"{name}.jsonl").read_text())
        for rank, answers in ((0, 2), (1, 0)):
            judge = made(server.url)
            judge.record_in(tmp_path, f"judge-0-rank-{rank}", counts=rank == 0)
            assert judge.spent()["answers"] == answers
        # What a process without the folder was answered is written by the one that has it.
        away = made(server.url)
        asked = ask(away, ["1", "2"])
        judge.record(away.unrecorded())
        resumed = made(server.url)
        resumed.record_in(tmp_path, "judge-0-rank-0")
        assert resumed.spent()["answers"] == 4
        # And is known, after a resume, where the folder is not seen.
        resumed.share(board := Shared(), known=True)
        away = made(server.url)
        away.share(board, known=False)
        requests = server.requests
        assert ask(away, ["1", "2"]) == asked
        assert server.requests == requests


def test_a_damaged_answer_is_asked_again_and_a_link_is_refused(tmp_path):
    with judging(by_digits) as server:
        judge = made(server.url)
        judge.record_in(tmp_path / "judge", "a")
        ask(judge, ["1", "2"])
        file = tmp_path / "judge" / "a.jsonl"
        first, second = file.read_text().splitlines()
        file.write_text(first.replace('"score": ', '"score": 1') + "\n" + second + "\n")
        again = made(server.url)
        with pytest.warns(UserWarning, match="1 answers of the judge are damaged"):
            again.record_in(tmp_path / "judge", "b")
        assert ask(again, ["1", "2"]) == slow(["1", "2"])
        assert server.requests == 3
    (tmp_path / "judge" / "z.jsonl").symlink_to(file)
    with pytest.raises(Exception, match="expected a regular file"):
        made(server.url).record_in(tmp_path / "judge", "a")


def test_what_a_judge_has_cost_is_that_of_the_run_it_serves(tmp_path):
    """One object may serve a run, its resume, and another run in one process."""
    with judging(lambda body, number: by_digits(body)) as server:
        judge = made(server.url, input_price=1e6)
        costs = []
        for run, questions in (("a", ["1", "2"]), ("a", ["1"]), ("b", ["3"])):
            judge.record_in(tmp_path / run, "judge-0-rank-0")
            ask(judge, questions)
            costs.append(judge.spent()["answers"])
    assert costs == [2, 2, 1]
