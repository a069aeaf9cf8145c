import tiny
import torch

from evo_grpo.rollout.native.decoder import RowCache


def run(model, input_ids, cache, **more):
    with torch.no_grad():
        return model(input_ids=input_ids, past_key_values=cache, use_cache=True, **more).logits


def test_prefill_and_steps_equal_one_whole_forward():
    model = tiny.llama()
    input_ids = tiny.ids(3, 8)
    cache = RowCache(2, 5)
    parts = [run(model, input_ids[:, :5], cache)]
    cache.select(torch.arange(3), 8)
    for column in range(5, 8):
        positions = torch.full((3, 1), column)
        parts.append(run(model, input_ids[:, column, None], cache, position_ids=positions))
    assert (cache.get_seq_length(), cache.get_max_length()) == (8, 8)
    with torch.no_grad():
        whole = model(input_ids=input_ids).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_rows_repeat_and_leave():
    model = tiny.llama()
    prompts = tiny.ids(2, 4)
    cache = RowCache(2, 4)
    run(model, prompts, cache)
    # Two completions of the first prompt, one of the second, and then the middle one is done.
    cache.select(torch.tensor([0, 0, 1]), 6)
    tokens = tiny.ids(3, 2, seed=8)
    positions = torch.full((3, 1), 4)
    run(model, tokens[:, :1], cache, position_ids=positions)
    cache.select(torch.tensor([0, 2]), cache.get_max_length())
    assert (cache.get_seq_length(), cache.get_max_length()) == (5, 6)
    got = run(model, tokens[[0, 2], 1:], cache, position_ids=positions[:2] + 1)
    whole = torch.cat([prompts, tokens[[0, 2]]], dim=1)
    with torch.no_grad():
        expected = model(input_ids=whole).logits[:, -1:]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_selecting_copies():
    cache = RowCache(1, 2)
    keys, values = tiny.noise((2, 1, 2, 4), 1), tiny.noise((2, 1, 2, 4), 2)
    cache.update(keys, values, 0)
    cache.select(torch.tensor([1, 1]), 3)
    layer = cache.layers[0]
    layer.keys[0, 0, 0] = 5.0
    assert torch.equal(layer.keys[1, :, :2], keys[1])
    assert torch.equal(layer.values[0, :, :2], values[1])
