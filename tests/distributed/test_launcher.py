"""The processes of `--nproc`: where they listen, and that they end with the one that began them."""

import os
import signal
import time
from ipaddress import ip_address
from pathlib import Path

import pytest
from forked import Forked
from rank_runs import children, evo, slow_reward, wait_for, written


@pytest.fixture
def running(tmp_path):
    """A run of two ranks with a finished round: its launcher and the ids of the ranks."""
    path = written(tmp_path, **slow_reward(tmp_path))
    launcher = Forked(
        evo("run", str(path), "--nproc", "2", "--out", str(tmp_path / "run")),
        cwd=tmp_path,
        # A cluster's own setting does not make ranks of one machine listen to others.
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
    )
    wait_for(tmp_path / "run" / "rounds.jsonl", 1, [launcher])
    ranks = children(launcher)
    yield launcher, ranks
    for pid in filter(is_alive, [launcher.pid, *ranks]):
        os.kill(pid, signal.SIGKILL)
    launcher.wait()


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def listening(pid):
    """The addresses on which a process listens."""
    held = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            place, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in held:
                words = bytes.fromhex(place.partition(":")[0])
                yield ip_address(b"".join(words[n : n + 4][::-1] for n in range(0, len(words), 4)))


def test_ranks_of_one_machine_listen_on_the_loopback_alone(running):
    launcher, ranks = running
    found = [address for rank in ranks for address in listening(rank)]
    assert len(ranks) == 2
    assert len(found) >= 3  # the store, and gloo in each rank
    assert all(address.is_loopback for address in found), found
    assert not list(listening(launcher.pid))


def test_ranks_end_with_a_launcher_that_is_killed(running):
    launcher, ranks = running
    assert all(map(is_alive, ranks))
    os.kill(launcher.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while any(map(is_alive, ranks)):
        assert time.monotonic() < until, "a rank trains on"
        time.sleep(0.05)
