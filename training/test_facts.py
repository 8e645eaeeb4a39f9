"""Lists of facts and what they answer: `python -m unittest` here, needs numpy alone."""

import random
import re
import unittest

import facts
import pictures


class Lists(unittest.TestCase):
    def test_what_is_asked_for_is_in_the_list(self):
        r, seen = random.Random(1), set()
        for _ in range(3000):
            text, asks = facts.shapes(r)
            for kind, slots, answer in asks:
                self.assertFalse(set(pictures.PHRASES[kind][0]) & set(pictures.PHRASES[kind][1]))
                if kind in ("colour", "shape"):
                    words = re.findall(r"\w+", answer)
                    shape = next(s for s in pictures.SHAPES if s in words)
                    colour = next(c for c in pictures.NAMES if c in words)
                    found = re.search(
                        rf"\b{colour} {shape}\b|\b{shape} {colour}\b|\b{shape} [\w ]*is {colour}\b", text
                    )
                    self.assertTrue(found, (text, answer))
                elif kind == "place":
                    spot = answer.split(" is ")[1].removeprefix("in the ").rstrip(".")
                    self.assertTrue(
                        spot in text.lower() or text.count("\n") + text.count(";") >= 2, (text, answer)
                    )
                seen.add(kind)
        self.assertEqual(
            seen, {"what", "describe", "colour", "shape", "count", "count of", "place", "side", "there"}
        )

    def test_bars_and_people_answer_for_themselves(self):
        r = random.Random(2)
        for _ in range(500):
            text, asks = facts.people(r)
            owns = {
                thing: (name, colour)
                for name, colour, thing in re.findall(r"(\w+) has an? (\w+) (\w+)\.", text)
            }
            for question, answer in asks:
                if found := re.fullmatch(r"Who has the (\w+)\?", question):
                    self.assertEqual(answer, f"{owns[found[1]][0]} has the {found[1]}.")
                elif found := re.fullmatch(r"What colour is the (\w+)\?", question):
                    self.assertEqual(answer, f"The {found[1]} is {owns[found[1]][1]}.")
                elif found := re.fullmatch(r"Does (\w+) have an? (\w+)\?", question):
                    self.assertEqual(answer, "Yes." if owns[found[2]][0] == found[1] else "No.")
            text, asks = facts.bars(r)
            for kind, slots, answer in asks:
                if kind == "bar colour":
                    self.assertIn(answer.split()[-1].rstrip("."), text)

    def test_held_out_pairs_and_phrasings_stay_held_out(self):
        r = random.Random(3)
        new = {phrase for _, phrases in pictures.PHRASES.values() for phrase in phrases if "{}" not in phrase}
        for _ in range(2000):
            turns = facts.turns(r)
            self.assertEqual(len(turns) % 2, 0)
            for shape, colour in pictures.HELD_OUT_PAIRS:
                self.assertNotRegex(turns[0], rf"\b{colour} {shape}\b")
            self.assertFalse(new & set(turns[2::2]))


if __name__ == "__main__":
    unittest.main()
