"""The dtype of a base that names none."""

import pytest
import torch

from evo_grpo.model import loading

pytestmark = pytest.mark.filterwarnings("always:engine.dtype:UserWarning")
CARD = torch.device("cuda:0")


@pytest.fixture
def card(monkeypatch):
    """A card of a compute capability, which PyTorch for ROCm has too."""

    def made(capability, hip=None):
        cuda = loading.torch.cuda
        monkeypatch.setattr(cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(cuda, "get_device_name", lambda device: f"Card {capability}")
        monkeypatch.setattr(loading.torch.version, "hip", hip)

    return made


def test_a_card_that_emulates_bfloat16_gets_float16_and_a_sentence(card, recwarn):
    loading._warn_float16.cache_clear()
    card((7, 5))
    assert [loading.pick_dtype("auto", CARD) for _ in range(2)] == [torch.float16] * 2
    (line,) = [str(one.message) for one in recwarn]
    assert "engine.dtype: auto is float16 on Card (7, 5)" in line
    assert loading.pick_dtype("bfloat16", CARD) is torch.bfloat16


@pytest.mark.parametrize(("capability", "hip"), [((8, 0), None), ((12, 0), None), ((0, 0), "7")])
def test_other_cards_get_bfloat16_and_the_cpu_float32(card, recwarn, capability, hip):
    card(capability, hip)
    assert loading.pick_dtype("auto", CARD) is torch.bfloat16
    assert loading.pick_dtype("auto", torch.device("cpu")) is torch.float32
    assert not list(recwarn)
