"""A value is pickled without its tensors, and comes back with them."""

import torch

from evo_grpo.population.ranks.ranks import pickle_without_tensors, unpickle_with_tensors


def test_tensors_are_left_out_of_what_is_pickled_and_put_back():
    many = torch.arange(12.0).reshape(3, 4)
    value = {"a": [many, many.T], "b": (torch.tensor(3), torch.zeros(0), "text"), "c": None}
    pickled, tensors = pickle_without_tensors(value)
    assert len(pickled) < 100
    assert all(tensor.is_contiguous() for tensor in tensors)
    back = unpickle_with_tensors(pickled, [tensor.clone() for tensor in tensors])
    assert torch.equal(back["a"][0], many)
    assert torch.equal(back["a"][1], many.T)
    assert back["b"][0] == 3
    assert back["b"][1].shape == (0,)
    assert (back["b"][2], back["c"]) == ("text", None)


def test_a_parameter_stays_one():
    parameter = torch.nn.Parameter(torch.ones(2))
    back = unpickle_with_tensors(*pickle_without_tensors(parameter))
    assert isinstance(back, torch.nn.Parameter)
    assert torch.equal(back, parameter)
