"""The centroid head of an assistant: score clusters first, then a few tokens.

Tokens are put into `C` equal clusters by halving them `log₂ C` times at the median
of the first principal direction of their head rows. The centroids are then fitted
so that the cluster of the drafter's own choice scores highest.
"""

import torch
import torch.nn.functional as F

FIT_STEPS = 1500
FIT_BATCH = 4096


def halve(rows, n_clusters):
    """A permutation of the row indices of `rows [V, H]`; each run of `V / n_clusters` is a cluster."""
    runs = [torch.arange(len(rows), device=rows.device)]
    while len(runs) < n_clusters:
        halves = []
        for run in runs:
            part = rows[run] - rows[run].mean(0)
            direction = torch.linalg.eigh(part.t() @ part)[1][:, -1]
            order = run[(part @ direction).argsort()]
            halves += [order[: len(order) // 2], order[len(order) // 2 :]]
        runs = halves
    return torch.cat(runs)


def fit(z, head_rows, n_clusters, start_scale=1.0):
    """Returns `(centroids [C, H], token_ordering [V])` for drafter states `z [N, H]`."""
    ordering = halve(head_rows, n_clusters)
    size = len(ordering) // n_clusters
    cluster_of = torch.empty_like(ordering)
    cluster_of[ordering] = torch.arange(len(ordering), device=z.device) // size
    centroids = head_rows[ordering].unflatten(0, (n_clusters, size)).mean(1) * start_scale
    centroids = centroids.clone().requires_grad_(True)
    adam = torch.optim.Adam([centroids], lr=3e-3)
    for step in range(FIT_STEPS):
        batch = z[torch.randint(len(z), (FIT_BATCH,), device=z.device)]
        with torch.no_grad():
            label = cluster_of[(batch @ head_rows.t()).argmax(-1)]
        loss = F.cross_entropy(batch @ centroids.t(), label)
        adam.zero_grad()
        loss.backward()
        adam.param_groups[0]["lr"] = 3e-3 * (1 - step / FIT_STEPS)
        adam.step()
    return centroids.detach(), ordering
