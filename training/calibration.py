"""What the confidences of a block drafter are worth, over texts that its target has written.

A guess counts where the target has kept all before it, as in use. The *Brier score* is the mean
of `(confidence − kept)²`: 0 is perfect, always saying the mean is `mean·(1 − mean)`. In a *walk*
a draft ends before the first guess, but for the first of all, whose likelihood to stay, the
product of the confidences up to it, is below a threshold; what a threshold is worth is told by
the tokens that a round gains and the guesses that it has checked.
"""

import torch

import evaluate

THRESHOLDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@evaluate.plainly
@torch.no_grad()
def guesses(model, head, sequences, device, temperature=0.0):
    """For each sequence `(confidence, kept)`, `[T, n]` each: of every block that could have been
    drafted how likely its guesses stay, as the head has it and as it is: the overlap of the
    distributions at a temperature, 0 or 1 without one."""
    found = [None] * len(sequences)
    for chunk in evaluate.in_batches(sequences):
        ids, _ = evaluate.padded([sequences[i] for i in chunk], device)
        out = model(ids[:, :-1])
        parts, scores = head.every_block(model, ids, out)
        confidence = torch.sigmoid(scores)
        kept = torch.zeros_like(confidence)
        T = out["logits"].shape[1]
        for k in range(min(head.n_rows, T - 1)):
            draft = torch.cat([p[:, :, k] for p in parts], 1)[:, : T - 1 - k]
            wanted = out["logits"][:, 1 + k :]
            if temperature:
                p, q = torch.softmax(wanted / temperature, -1), torch.softmax(draft / temperature, -1)
                kept[:, : T - 1 - k, k] = torch.minimum(p, q).sum(-1)
            else:
                kept[:, : T - 1 - k, k] = (draft.argmax(-1) == wanted.argmax(-1)).float()
        for r, i in enumerate(chunk):
            rows = len(sequences[i]) - 1
            found[i] = confidence[r, :rows].cpu(), kept[r, :rows].cpu()
    return found


def counted(found, starts):
    """`(confidence, kept, weight, position)`, flat, of all guesses inside the answers: a guess
    weighs as much as those before it are likely to stay."""
    rows = []
    for (confidence, kept), start in ((f, s) for f, s in zip(found, starts) if f is not None):
        n = kept.shape[1]
        weight = torch.cat([torch.ones(len(kept), 1), kept.cumprod(1)[:, :-1]], 1)
        p, k = torch.meshgrid(torch.arange(len(kept)), torch.arange(n), indexing="ij")
        inside = (p >= start - 1) & (p < len(kept) - 1 - k)
        rows.append([x[inside] for x in (confidence, kept, weight, k)])
    return [torch.cat(column).double() for column in zip(*rows)]


def scores(found, starts):
    """Brier score, mean confidence and mean kept, together, by position and by decile of the
    confidence, each with the guesses counted."""
    confidence, kept, weight, position = counted(found, starts)

    def of(pick):
        c, a, w = confidence[pick], kept[pick], weight[pick]
        total = w.sum().clamp_min(1e-9)
        brier = (w * (a * (1 - c) ** 2 + (1 - a) * c**2)).sum() / total
        mean = lambda x: ((w * x).sum() / total).item()
        return {"guesses": w.sum().item(), "confidence": mean(c), "kept": mean(a), "brier": brier.item()}

    decile = (confidence * 10).long().clamp(0, 9)
    return {
        "all": of(torch.ones_like(decile, dtype=torch.bool)),
        "by_position": [of(position == k) for k in range(int(position.max()) + 1)],
        "by_decile": [of(decile == d) for d in range(10)],
    }


def walk(found, starts, threshold):
    """Tokens a round and guesses a round with drafts that end by `threshold`, greedily."""
    rounds = tokens = checked = 0
    for (confidence, kept), start in ((f, s) for f, s in zip(found, starts) if f is not None):
        worth = (confidence.cumprod(1) >= threshold).long().cumprod(1).sum(1).clamp_min(1).tolist()
        right = kept.long().cumprod(1).sum(1).tolist()
        p, end = start - 1, len(kept) - 1
        while p < end:
            drafted = min(worth[p], end - p)
            gained = min(right[p], drafted)
            rounds, checked = rounds + 1, checked + drafted
            tokens += min(gained + 1, end - p)
            p += gained + 1
    return {"tokens": tokens / max(rounds, 1), "guesses": checked / max(rounds, 1)}


def report(model, head, texts, device):
    """All of it over `{temperature: (sequences, starts)}`; walks are over greedy answers."""
    result = {}
    for temperature, (sequences, starts) in texts.items():
        found = guesses(model, head, sequences, device, temperature)
        result[f"T={temperature}"] = scores(found, starts)
        if not temperature:
            result["walks"] = {str(t): walk(found, starts, t) for t in THRESHOLDS}
    return result


def table(result):
    """Calibration as Markdown."""
    lines = ["| confidence | " + " | ".join(f"{d / 10:.1f}–{(d + 1) / 10:.1f}" for d in range(10)) + " | Brier |"]
    lines.append("|---|" + "---|" * 11)
    for key, found in result.items():
        if not key.startswith("T="):
            continue
        cells = [f"{x['kept']:.2f} of {x['guesses']:.0f}" if x["guesses"] >= 1 else "" for x in found["by_decile"]]
        temperature = float(key[2:])
        what = f"kept at T = {temperature:g}" if temperature else "kept, greedily"
        lines.append(f"| {what} | " + " | ".join(cells) + f" | {found['all']['brier']:.3f} |")
    lines += ["", "| threshold | " + " | ".join(f"{float(t):g}" for t in result["walks"]) + " |"]
    lines.append("|---|" + "---|" * len(result["walks"]))
    for name in ("tokens", "guesses"):
        cells = [f"{w[name]:.2f}" for w in result["walks"].values()]
        lines.append(f"| {name} a round | " + " | ".join(cells) + " |")
    return lines
