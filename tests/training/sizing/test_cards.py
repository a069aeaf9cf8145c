"""The GPUs of a machine, and the table of cards."""

import subprocess

import pytest
from small_run import small

from evo_grpo.errors import ConfigError
from evo_grpo.training.sizing import cards
from evo_grpo.training.sizing.cards import CARDS, Gpu, parse_gpu
from evo_grpo.training.sizing.machine import dtypes, setup_here
from evo_grpo.training.sizing.model_size import read_model_size

T4 = Gpu("Tesla T4", 40960 << 20)


def test_cuda_devices_are_asked_of_the_drivers_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cards.cuda_devices() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '81559, NVIDIA H100\\n40960, Tesla T4\\n'\n")
    tool.chmod(0o755)
    assert cards.cuda_devices() == [Gpu("NVIDIA H100", 81559 << 20), T4]
    tool.write_text("#!/bin/sh\nprintf '[N/A], NVIDIA A30\\n40960, Tesla T4\\n'\n")
    assert cards.cuda_devices() == [None, T4]
    for chosen, left in (
        ("1", [T4]),
        ("1,0", [T4, None]),
        ("1,7,0", [T4]),
        ("GPU-5d3f", [None]),
        ("-1", []),
        ("", []),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert cards.cuda_devices() == left, chosen
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert cards.cuda_devices() == []
    tool.write_text("no program")
    assert cards.cuda_devices() == []


def test_a_driver_that_does_not_answer_is_not_waited_for(monkeypatch):
    def hang(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(cards.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(cards.subprocess, "run", hang)
    assert cards.cuda_devices() == []


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24", 24 * 10**9),
        ("23.5 gib", int(23.5 * 2**30)),
        ("a100-80gb", int(79.1 * 2**30)),
        ("NVIDIA A100 80GB", int(79.1 * 2**30)),
        ("GeForce RTX 4090", int(23.5 * 2**30)),
    ],
)
def test_a_card_has_its_memory(text, size):
    assert parse_gpu(text) == (text, size)


@pytest.mark.parametrize(("card", "dtype"), [("NVIDIA T4", "float16"), ("a10", "bfloat16")])
def test_a_card_is_planned_for_in_its_half_precision(card, dtype):
    assert dtypes(small(engine__device="auto"), parse_gpu(card)) == {dtype: "cuda"}
    assert dtypes(small(engine={"dtype": "float32"}), parse_gpu(card)) == {"float32": "cuda"}


def test_an_unknown_card_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"got 'a100-80', did you mean a100-80gb\?") as caught:
        parse_gpu("a100-80")
    assert all(name in str(caught.value) for name in CARDS)
    for text in ("", "0GB", "-3GB", "24TB", "two cards"):
        with pytest.raises(ConfigError, match=r"^--gpu: expected a size such as 24GB, or one of"):
            parse_gpu(text)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA L40S", "l40s"),
        ("h200", "h200"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A10-24Q", None),
        ("24GB", None),
    ],
)
def test_a_driver_s_name_finds_its_row(name, row):
    assert Gpu(name, 1).card == (row and CARDS[row])


def test_a_card_that_is_seen_is_planned_for_in_its_half_precision(monkeypatch):
    monkeypatch.setattr("evo_grpo.training.sizing.machine.cuda_devices", lambda: [None, T4])
    setup = setup_here(small(engine={"device": "cuda"}), read_model_size("tiny-sums"), 32)
    assert (setup.dtype, setup.place, setup.gpu) == ("float16", "the CUDA device", T4)
