"""Questions and what the pictures show: `python -m unittest` here, needs numpy alone."""

import unittest

import pictures


def shapes_of(scene):
    """The `(shape, colour)` pairs of a scene, from its cells."""
    return [
        (pictures.SHAPES[kind - 1], pictures.NAMES[colour - 1])
        for _, kind, colour, _ in scene.cells
        if 1 <= kind <= len(pictures.SHAPES)
    ]


class Questions(unittest.TestCase):
    def drawn(self, n, split="train", n_frames=1):
        r = pictures.rng(3)
        examples = (pictures.example((8, 8), r, n_frames, split, n_asks=2) for _ in range(n))
        return [(frames, *ask) for frames, asks in examples for ask in asks]

    def test_counts_and_colours_are_those_of_the_scene(self):
        seen = set()
        for frames, kind, question, answer in self.drawn(900):
            there = shapes_of(frames[0])
            if kind == "count":
                self.assertEqual(answer, f"{len(there)}.")
            elif kind == "colour":
                shape = next(s for s in pictures.SHAPES if s in question)
                self.assertEqual([answer], [f"The {s} is {c}." for s, c in there if s == shape])
            elif kind == "describe":
                self.assertEqual({p for p in there if f"{p[1]} {p[0]} in the" in answer}, set(there))
            elif kind == "there":
                pair = next(
                    ((s, c) for s in pictures.SHAPES for c in pictures.NAMES if f"{c} {s}" in question)
                )
                self.assertEqual(answer, "Yes." if pair in there else "No.")
            seen.add(kind)
        clips = {x[1] for x in self.drawn(50, n_frames=2)}
        self.assertEqual(seen | clips, set(pictures.PHRASES))

    def test_a_place_is_where_the_shape_stands(self):
        for frames, kind, question, answer in self.drawn(800):
            if kind != "place":
                continue
            for at, mark, colour, more in frames[0].cells:
                thing = f"{pictures.NAMES[colour - 1]} {pictures.SHAPES[mark - 1]}"
                if thing in question:
                    row, column = at // 8, at % 8
                    spot = min(row * 3 // 8, 2) * 3 + min(column * 3 // 8, 2)
                    self.assertEqual(answer, f"The {thing} is {pictures.place(spot)}.")
                    self.assertEqual(more, 1 + spot)

    def test_bars_are_as_high_as_they_are_drawn(self):
        for frames, kind, question, answer in self.drawn(800):
            if kind != "height":
                continue
            bar = "ABCD".index(next(w.strip("?.") for w in question.split() if w.strip("?.") in "ABCD"))
            boxes = [m for m in frames[0].marks if m[0] == pictures.BOX]
            drawn = [m[4] for m in boxes if m[3] < 3]  # lines are as wide as the picture
            self.assertEqual(answer, f"Bar {'ABCD'[bar]} is {round(drawn[bar] * 6 / (8 - 2.2))} high.")

    def test_training_never_shows_what_is_held_out(self):
        for n_frames in (1, 4):
            for frames, kind, _, answer in self.drawn(600, n_frames=n_frames):
                self.assertFalse(pictures.HELD_OUT_PAIRS & {p for f in frames for p in shapes_of(f)})
                if kind == "number":
                    self.assertFalse(pictures.is_held_out(int(answer[:-1])))
            for frames, kind, _, answer in self.drawn(200, "combination", n_frames):
                rare = pictures.HELD_OUT_PAIRS & {p for f in frames for p in shapes_of(f)}
                self.assertTrue(rare or pictures.is_held_out(int(answer[:-1])))

    def test_new_phrasings_are_none_of_training(self):
        for usual, new in pictures.PHRASES.values():
            self.assertFalse(set(new) & set(usual))

    def test_a_moving_shape_moves_the_way_that_is_said(self):
        steps = {"To the left.": (-1, 0), "To the right.": (1, 0), "Up.": (0, -1), "Down.": (0, 1)}
        for frames, kind, _, answer in self.drawn(200, n_frames=4):
            if kind == "way":
                (_, x0, y0, *_), (_, x1, y1, *_) = frames[0].marks[0], frames[-1].marks[0]
                sign = lambda d: 0 if abs(d) < 1e-6 else (1 if d > 0 else -1)
                self.assertEqual((sign(x1 - x0), sign(y1 - y0)), steps.get(answer, (0, 0)))


if __name__ == "__main__":
    unittest.main()
