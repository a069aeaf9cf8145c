"""Every causal architecture of the installed transformers against plain transformers and PEFT.

    python experiments/architectures/sweep.py                     # what has no result yet
    python experiments/architectures/sweep.py --only mistral opt  # some, again
    python experiments/architectures/sweep.py --sample            # one of each kind
    python experiments/architectures/sweep.py --page              # writes docs/architectures.md

Each runs in a process of its own with a limit of time and memory, so a crash is a row and not the
end. Results are one line of JSON per architecture; a run that is stopped goes on where it was.
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.jsonl"
PAGE = ROOT / "docs" / "architectures.md"
SECONDS, BYTES = 300, 8 << 30
#: One of each kind: layers of its own, Conv1D, positions learned, sloped and counted from the
#: cache, local attention, a mixture of experts, flattened rows, a state, an encoder, no cache.
SAMPLE = (
    "llama",
    "gpt2",
    "opt",
    "mpt",
    "bart",
    "gemma3_text",
    "qwen3_moe",
    "phimoe",
    "mamba",
    "bert",
    "openai-gpt",
)


def main() -> int:
    """Run the sweep; returns 1 where an architecture is wrong or late."""
    args = _arguments()
    if args.page:
        from page import page

        PAGE.write_text(page(_read(args.out), _model_types()), encoding="utf-8")
        return 0
    wanted = args.only or (SAMPLE if args.sample else tuple(_model_types()))
    known = {} if args.again or args.only else {r["model_type"]: r for r in _read(args.out)}
    for model_type in wanted:
        if model_type in known:
            continue
        row = run_one(model_type)
        _write(args.out, row)
        print(f"{row['verdict']:>12}  {model_type}  {row['sentence']}", flush=True)
    rows = [r for r in _read(args.out) if r["model_type"] in set(wanted)]
    counts = {v: sum(r["verdict"] == v for r in rows) for v in sorted({r["verdict"] for r in rows})}
    print(json.dumps(counts))
    return int(any(r["verdict"] in ("wrong", "late") for r in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types, again")
    parser.add_argument("--sample", action="store_true", help="one of each kind")
    parser.add_argument("--again", action="store_true", help="also what is in the results")
    parser.add_argument("--page", action="store_true", help="write docs/architectures.md")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results, a line each")
    return parser.parse_args()


def _model_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def run_one(model_type: str) -> dict[str, Any]:
    """Check one architecture in a process of its own."""
    sys.path.insert(0, str(HERE))
    import checks  # noqa: F401 -- loaded once, before the processes part
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    start = time.perf_counter()
    child = context.Process(target=_child, args=(model_type, theirs))
    child.start()
    theirs.close()
    row: dict[str, Any] = {"verdict": "late", "sentence": f"no answer after {SECONDS} s"}
    try:
        if ours.poll(SECONDS):
            row = ours.recv()
    except EOFError:
        child.join()
        row = {"verdict": "late", "sentence": f"the process ended with {child.exitcode}"}
    child.kill()
    child.join()
    return {
        "model_type": model_type,
        "architecture": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type],
        **row,
        "transformers": version("transformers"),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _child(model_type: str, out: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    signal.alarm(SECONDS + 5)
    import torch
    from checks import CannotBuildError, check
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        row = asdict(check(model_type))
    except CannotBuildError as error:
        row = {"verdict": "cannot build", "sentence": str(error)}
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(trace.filename).name}:{trace.lineno}"
        row = {"verdict": "late", "sentence": f"{type(error).__name__}: {error} ({where})"}
    row["sentence"] = " ".join(row["sentence"].split())[:500]
    out.send(row)
    out.close()


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    # The last line of an architecture counts.
    return list({row["model_type"]: row for row in rows}.values())


def _write(file: Path, row: dict[str, Any]) -> None:
    rows = {r["model_type"]: r for r in _read(file)} | {row["model_type"]: row}
    order = {name: i for i, name in enumerate(_model_types())}
    lines = [json.dumps(rows[name]) for name in sorted(rows, key=order.__getitem__)]
    partial = file.with_suffix(".part")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(file)


if __name__ == "__main__":
    sys.exit(main())
