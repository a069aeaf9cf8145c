"""What TensorBoard and wandb, offline, have written of a run: {(who, metric): [(step, value)]}."""

import json
import struct

BLOCK, HEADER = 32768, 7


def accumulated(folder):
    """Return the events that TensorBoard finds in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def read_tensorboard(folder):
    """Return what TensorBoard shows of a run."""
    out = {}
    for who in sorted((folder / "trackers/tensorboard").iterdir()):
        events = accumulated(who)
        for name in events.Tags()["scalars"]:
            out[who.name, name] = [(e.step, e.value) for e in events.Scalars(name)]
    return out


def files_of_wandb(folder):
    """Return the files that `wandb sync` sends."""
    return sorted((folder / "trackers/wandb/wandb").glob("offline-run-*/*.wandb"))


def records_of_wandb(path):
    """Yield the records of a .wandb file: a header, then the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def runs_of_wandb(folder):
    """Return the records that open a run, one a file."""
    records = (record for path in files_of_wandb(folder) for record in records_of_wandb(path))
    return [record.run for record in records if record.HasField("run")]


def ended_wandb(folder):
    """Return whether the file of the last start is written to its end."""
    from google.protobuf.message import DecodeError

    try:
        records = list(records_of_wandb(files_of_wandb(folder)[-1]))
    except DecodeError:  # half of a record
        return False
    return bool(records) and records[-1].HasField("exit")


def steps_of_wandb(folder):
    """Return the id of the run of each file, and how many steps the file has."""
    found = []
    for path in files_of_wandb(folder):
        records = list(records_of_wandb(path))
        ids = [record.run.run_id for record in records if record.HasField("run")]
        found += [(id, sum(record.HasField("history") for record in records)) for id in ids]
    return found


def read_wandb(folder):
    """Return what wandb shows of a run."""
    out = {}
    for path in files_of_wandb(folder):
        for record in records_of_wandb(path):
            items = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in items.items():
                metric, slash, who = name.rpartition("/")
                agent = slash and who.startswith("agent-")
                key = (who, metric) if agent else ("population", name)
                if isinstance(value, int | float) and not name.startswith("_"):
                    out.setdefault(key, []).append((items["_step"], value))
    return out
