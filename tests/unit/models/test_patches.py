"""Patch embeddings: the same numbers and gradients as the convolution's, with its weights under their names."""

import pytest
import torch

from lmm_r1.models.image_features import multiply_patches


def embedding(**settings: object) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv3d(2, 3, kernel_size=(2, 2, 2), stride=2, **settings))


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_gives_the_convolutions_outputs_and_gradients(bias):
    stock, product = embedding(bias=bias), embedding(bias=bias)
    multiply_patches(product)
    assert product.state_dict().keys() == stock.state_dict().keys()
    patches = torch.randn(5, 2, 2, 2, 2)
    outputs = [model(patches) for model in (stock, product)]
    assert outputs[1].shape == (5, 3, 1, 1, 1)
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    for mine, theirs in zip(product.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_one_patch_is_the_sum_over_its_values_times_the_weights():
    model = torch.nn.Sequential(torch.nn.Conv3d(1, 1, kernel_size=(1, 1, 2), bias=True))
    multiply_patches(model)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([2.0, 3.0]).view(1, 1, 1, 1, 2))
        model[0].bias.fill_(0.5)
    assert model(torch.tensor([5.0, 7.0]).view(1, 1, 1, 1, 2)).item() == 2 * 5 + 3 * 7 + 0.5
