"""Experts as one product of all, against their definition one by one: needs torch and no GPU."""

import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest("needs torch") from error

from layers import Experts, gelu_tanh, top_k_weights

N, K, HIDDEN, WIDTH = 8, 2, 24, 12


def chosen(probabilities, k):
    """`top_k_weights` by sorting: a stable sort has the first of equal ones first."""
    values, places = probabilities.sort(stable=True, dim=-1, descending=True)
    kept = torch.zeros_like(probabilities).scatter(-1, places[..., :k], values[..., :k])
    return kept / values[..., :k].sum(-1, keepdim=True)


def one_by_one(experts, x, weights):
    out = 0
    for matrix, down, weight in zip(experts.gate_up_proj, experts.down_proj, weights.unbind(-1)):
        gate, up = (x @ matrix.T).chunk(2, -1)
        out = out + weight[..., None] * ((experts.act(gate) * up) @ down.T)
    return out


class Routing(unittest.TestCase):
    def test_weights_have_the_bits_of_sorting_and_scattering(self):
        logits = torch.randn(500, N, generator=torch.Generator().manual_seed(0))
        for probabilities in (logits.softmax(-1), logits.round().softmax(-1)):  # the second with ties
            found = top_k_weights(probabilities, K)
            self.assertTrue(torch.equal(found, chosen(probabilities, K)))
            self.assertTrue(((found > 0).sum(-1) == K).all())

    def test_gradients_are_those_of_sorting_and_scattering(self):
        logits = torch.randn(50, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        towards = torch.linspace(-1, 1, N, dtype=torch.float64)
        gradients = []
        for form in (top_k_weights, chosen):
            leaf = logits.clone().requires_grad_()
            (form(leaf.softmax(-1), K) * towards).sum().backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-15)


class Products(unittest.TestCase):
    def test_all_at_once_give_the_values_and_gradients_of_one_by_one(self):
        torch.manual_seed(2)
        experts = Experts(N, HIDDEN, WIDTH, gelu_tanh, None).double()
        x = torch.randn(3, 5, HIDDEN, dtype=torch.float64)
        weights = top_k_weights(torch.randn(3, 5, N, dtype=torch.float64).softmax(-1), K)
        results = []
        for form in (experts, lambda x, w: one_by_one(experts, x, w)):
            leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            out = form(*leaves)
            results.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, *experts.parameters()])])
        for ours, theirs in zip(*results, strict=True):
            self.assertGreater(theirs.abs().max().item(), 0)
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


if __name__ == "__main__":
    unittest.main()
