"""Attacks with links, pipes, sockets and sizes on files of a run folder."""

import os
import socket
import stat

import pytest

from evo_grpo.errors import RunDirError
from evo_grpo.record.files import atomic_write
from evo_grpo.record.plain import (
    inside,
    is_plain,
    open_plain,
    read_plain,
    refuse_links,
)


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "outside").mkdir()
    file = tmp_path / "outside" / "victim.txt"
    file.write_text("theirs")
    return file


def link(path, victim):
    path.symlink_to(victim)


def dangling(path, victim):
    path.symlink_to(victim.with_name("nothing"))


def pipe(path, victim):
    os.mkfifo(path)


def folder(path, victim):
    path.mkdir()


def listening(path, victim):
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


NOT_PLAIN = [link, dangling, pipe, folder, listening]


@pytest.mark.parametrize("plant", NOT_PLAIN)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT])
def test_a_planted_link_pipe_socket_or_folder_is_not_opened_as_a_file(
    tmp_path, victim, plant, flags, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
    path = tmp_path / "file"
    plant(path.relative_to(tmp_path), victim)
    with pytest.raises(RunDirError, match=r"file: expected a regular file or folder .*, got a "):
        os.close(open_plain(path, flags))
    assert not is_plain(path)
    assert victim.read_text() == "theirs"
    assert os.listdir(victim.parent) == ["victim.txt"]


def test_another_user_gets_what_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        os.close(open_plain(tmp_path / "a", os.O_RDWR | os.O_CREAT))
        atomic_write(tmp_path / "b", "text")
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"} == {0o640}


def test_a_sparse_file_of_gigabytes_is_not_read(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(20 << 30)
    with pytest.raises(RunDirError, match=r"at most 67,108,864 bytes, got 21,474,836,480; put"):
        read_plain(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "a.json")
    with pytest.raises(RunDirError, match=r"a\.json: expected a file of at most 1,000 bytes"):
        refuse_links(tmp_path, 1000)


def test_a_hard_link_to_a_file_outside_is_not_written_to(tmp_path, victim):
    os.link(victim, tmp_path / "a")
    assert read_plain(tmp_path / "a") == b"theirs"
    with pytest.raises(RunDirError, match=r"2 names \(hard links\).*copy it"):
        open_plain(tmp_path / "a", os.O_RDWR)


@pytest.mark.parametrize("plant", [link, dangling, pipe])
@pytest.mark.parametrize("place", ["x", "a/x", "a/b/x"])
def test_a_link_or_pipe_deep_in_a_folder_is_refused(tmp_path, victim, plant, place):
    (tmp_path / "run" / "a" / "b").mkdir(parents=True)
    (tmp_path / "run" / "a" / "file").write_text("")
    refuse_links(tmp_path / "run")
    plant(tmp_path / "run" / place, victim)
    with pytest.raises(RunDirError, match=rf"run/{place}: expected a regular file"):
        refuse_links(tmp_path / "run")


def test_a_recorded_path_that_leads_out_of_the_folder_or_through_a_link_is_refused(
    tmp_path, victim
):
    for path in ("", ".", "/", "/etc", "..", "../a", "a/../../b", "a\\b", "a\0b"):
        with pytest.raises(RunDirError, match="expected a path below the folder"):
            inside(tmp_path, path)
    assert inside(tmp_path, "checkpoints/a..b/.c") == tmp_path / "checkpoints/a..b/.c"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").symlink_to(victim.parent)
    with pytest.raises(RunDirError, match=r"run/a: expected .* got a link to"):
        inside(tmp_path / "run", "a/victim.txt")
