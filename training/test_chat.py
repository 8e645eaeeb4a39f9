"""The Python renderer and the shipped Jinja templates write the same text."""

import json
import random
import unittest
from pathlib import Path

import jinja2.sandbox

import chat
import conversations

TEMPLATES = Path(__file__).parent / "templates"


def template(family):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((TEMPLATES / f"{family}.jinja").read_text())


class Templates(unittest.TestCase):
    def test_python_and_jinja_agree_on_random_conversations(self):
        source = random.Random(1)
        for family, bos in (("gemma", "<bos>"), ("qwen", "")):
            jinja = template(family)
            for _ in range(400):
                talk = conversations.generate(source)
                messages, tools = talk["messages"], talk["tools"]
                for ask in (False, True):
                    # The question alone when the answer is asked for.
                    shown = messages[:-1] if ask else messages
                    if not shown or (not ask and messages[-1].get("tool_calls")):
                        continue
                    ours = chat.RENDER[family](shown, tools, talk["thinking"], ask)
                    theirs = jinja.render(
                        messages=shown,
                        tools=tools or None,
                        enable_thinking=talk["thinking"],
                        add_generation_prompt=ask,
                        bos_token=bos,
                    )
                    self.assertEqual(ours, theirs)

    def test_a_prompt_is_a_prefix_of_its_training_text(self):
        source = random.Random(2)
        for family in chat.RENDER:
            for _ in range(400):
                talk = conversations.generate(source)
                if not talk["messages"][-1].get("content"):
                    continue
                whole = chat.document(talk, family)
                prompt = chat.RENDER[family](talk["messages"][:-1], talk["tools"], talk["thinking"], True)
                self.assertTrue(whole.startswith(prompt), (prompt, whole))

    def test_pictures_of_a_question_become_their_tokens(self):
        parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
        for family, want in (
            ("gemma", "<|turn>user\n<|image|>What is this?<turn|>\n"),
            (
                "qwen",
                "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is this?<|im_end|>\n",
            ),
        ):
            messages = [{"role": "user", "content": parts}]
            self.assertIn(want, template(family).render(messages=messages, bos_token="<bos>"))


if __name__ == "__main__":
    unittest.main()
