"""A request is a file of its own: whole, sealed, in order, and never behind a link."""

import json
import os

import pytest

from evo_grpo.errors import RunDirError
from evo_grpo.record import files
from evo_grpo.record.run_dir import clear_run
from evo_grpo.record.steering import read_requests, remove_requests, write_request
from evo_grpo.types import Request


def written(folder, **given):
    values = {"lr": 1e-4, "clip_coef": [0.8, 1.2]}
    one = write_request(folder, Request("", "set", agent=3, values=values, **given))
    return one, folder / "steering" / f"{one.id}.json"


def test_requests_come_back_in_the_order_in_which_they_were_asked_for(tmp_path):
    asked = [written(tmp_path, after=number)[0] for number in range(12)]
    assert read_requests(tmp_path).requests == tuple(asked)
    remove_requests(tmp_path, {asked[0].id, "not there"})
    assert read_requests(tmp_path).requests == tuple(asked[1:])
    assert read_requests(tmp_path).unread == {}


def test_a_run_of_which_nothing_was_asked_has_none(tmp_path):
    assert read_requests(tmp_path).requests == ()
    remove_requests(tmp_path, {"any"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [0, 1, 40, -2])
def test_a_truncated_request_is_told_of_and_carried_out_by_nobody(tmp_path, cut):
    _, file = written(tmp_path)
    whole, _ = written(tmp_path)
    file.write_bytes(file.read_bytes()[:cut])
    found = read_requests(tmp_path)
    assert found.requests == (whole,)
    assert "expected a request as evo-grpo steer writes it, but" in found.unread[file.name]


def test_what_is_written_otherwise_is_no_request(tmp_path):
    one, file = written(tmp_path)
    data = json.loads(file.read_text())
    del data["sha256"]
    for change, said in (
        ({"format": 2}, "it is not of format 1"),
        ({"agent": "three"}, "agent: "),
        ({"id": "0" * 20 + "-00000000"}, "which is not its name"),
    ):
        file.write_text(files.seal({**data, **change}))
        assert said in read_requests(tmp_path).unread[file.name]
    file.write_text(files.seal(data))
    assert read_requests(tmp_path).requests == (one,)


def test_a_link_in_the_place_of_a_request_is_not_followed(tmp_path):
    _, file = written(tmp_path)
    outside = tmp_path / "outside.json"
    file.rename(outside)
    file.symlink_to(outside)
    found = read_requests(tmp_path)
    assert found.requests == ()
    assert "got a link to" in found.unread[file.name]
    with pytest.raises(RunDirError, match="got a link to"):
        written(tmp_path)
    remove_requests(tmp_path, {file.stem})
    assert outside.exists()
    assert not os.path.lexists(file)


@pytest.mark.parametrize("plant", ["link", "file", "pipe"])
def test_what_stands_in_the_place_of_the_folder_is_refused(tmp_path, plant):
    place, elsewhere = tmp_path / "steering", tmp_path / "elsewhere"
    elsewhere.mkdir()
    written(elsewhere)
    if plant == "link":
        place.symlink_to(elsewhere / "steering")
    elif plant == "pipe":
        os.mkfifo(place)
    else:
        place.write_text("")
    with pytest.raises(RunDirError, match="steering: expected a"):
        written(tmp_path)
    found = read_requests(tmp_path)
    assert found.requests == ()
    assert list(found.unread) == ["steering"]
    assert len(list((elsewhere / "steering").glob("*-*.json"))) == 1


def test_clearing_removes_requests_and_nothing_else(tmp_path):
    written(tmp_path)
    mine = tmp_path / "steering" / "notes.txt"
    mine.write_text("mine")
    clear_run(tmp_path)
    assert list((tmp_path / "steering").iterdir()) == [mine]
    mine.unlink()
    clear_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
