import pytest

from evo_grpo.cli.plan.machine import missing_device


@pytest.mark.parametrize(
    ("device", "there", "found"),
    [
        ("cuda", [], "engine.device is cuda, and this machine shows no CUDA device"),
        ("cuda:1", [], "engine.device is cuda:1, and this machine shows no CUDA device"),
        ("cuda:2", [8, None], "engine.device is cuda:2, and the last CUDA device here is cuda:1"),
        ("cuda:1", [8, None], None),
        ("cuda", [None], None),
        ("cuda", None, None),
        ("auto", [], None),
        ("cpu", [], None),
    ],
)
def test_cuda(device, there, found):
    texts = list(missing_device(device, there))
    if found is None:
        assert texts == []
    else:
        (text,) = texts
        assert text == (
            f"{found}: a run will be refused here; set auto or cpu, or run it where there is one"
        )


def test_mps(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    (text,) = missing_device("mps", [8])
    assert text.startswith("engine.device is mps, which only a Mac has: a run will be refused")
    monkeypatch.setattr("sys.platform", "darwin")
    assert list(missing_device("mps", [])) == []
