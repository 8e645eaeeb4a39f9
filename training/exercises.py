"""Questions with computed answers, small talk, code and the engine's own topics.

Every function takes a `random.Random` and returns a neutral record, either
`{prompt, response}` or `{turns}`. Sums, sorted lists, spelling and JSON are
computed, never guessed. Everything here is our own work and may be used freely
(CC0-1.0).

Deliberately absent: system turns, thoughts and tools (`conversations.py`).
"""

import json
import random
import re

from stories import BOYS, GIRLS, spin, story
from stories import prompt as story_prompt

NAME = "Paceline"  # what the assistant calls itself
NAMES = BOYS + GIRLS

# ---------------------------------------------------------------- 1. engine and speculative decoding Q&A
# (question spintax, [answers])  -- answers are short and true; the engine's name is left out on purpose
E = [
    (
        "[What is|Explain|Can you explain|Tell me about] speculative decoding[?|.| in simple words.]",
        [
            "Speculative decoding makes a language model faster without changing its answers. A small, quick drafter guesses the next few tokens. The big model then checks all the guesses in one pass. Guesses that match are kept. The first wrong guess is thrown away and replaced by the big model's own token.",
            "In speculative decoding, a small drafter guesses several tokens ahead, and the large model checks them all at once. Checking many tokens together costs about as much as making one, so every accepted guess saves time.",
            "It is a team of two. The drafter is fast and guesses. The target model is careful and checks. Because every token is checked, the text is the same as without the drafter, only faster.",
        ],
    ),
    (
        "[Why is speculative decoding faster?|How does speculative decoding save time?|Why does drafting help?]",
        [
            "Making one token means reading all the weights of the model from memory. Checking five tokens reads the same weights only once. So if some of the guesses are right, you get several tokens for the price of one.",
            "Decoding is mostly limited by memory speed. A check of several drafted tokens reads the weights once, so each accepted token is almost free.",
        ],
    ),
    (
        "[Does speculative decoding change the output?|Is speculative decoding lossless?|Will I get different text with a drafter?]",
        [
            "No. With greedy decoding the output is the same, token for token, because the target model checks every guess. With sampling, the acceptance rule keeps the same probabilities.",
            "No. A wrong guess is never kept, so the drafter can only change the speed, not the text.",
        ],
    ),
    (
        "[What is|Explain|What does it mean:] MTP[?| in language models?]",
        [
            "MTP means multi-token prediction. A small extra head is trained to predict more than the next token. At run time the head acts as a built-in drafter for speculative decoding.",
            "MTP stands for multi-token prediction. The model gets a small head that looks at the last hidden state and the newest token and guesses the token after it.",
        ],
    ),
    (
        "[What is a drafter?|What does the drafter do?|What is a draft model?]",
        [
            "A drafter is a small, fast model that guesses the next tokens. The big model, called the target, checks the guesses.",
            "The drafter proposes tokens. It does not have to be right every time. It only has to be right often enough to save time.",
        ],
    ),
    (
        "[What is the target model?|What does the target model do in speculative decoding?]",
        [
            "The target is the big model whose text you want. It checks the drafted tokens and always has the last word."
        ],
    ),
    (
        "[What is the acceptance rate?|What does acceptance rate mean?|What is a good acceptance rate?]",
        [
            "The acceptance rate is the share of drafted tokens that the target model agrees with. If 7 of 10 guesses are kept, the acceptance rate is 70 percent.",
            "It tells how often the drafter guesses right. A higher acceptance rate means more tokens per step. Around 60 to 80 percent is good for short drafts.",
        ],
    ),
    (
        "[What happens to a wrong guess?|What happens when a draft token is rejected?|What if the drafter is wrong?]",
        [
            "The wrong token and everything after it are thrown away. The target model puts its own token in that place, and drafting starts again from there.",
            "Nothing bad happens. The rest of the draft is dropped, the cache is rolled back, and the target's own token is used.",
        ],
    ),
    (
        "[What is a token?|What are tokens?]",
        [
            "A token is a small piece of text, often a word or a part of a word. The model reads and writes tokens, one after another.",
            "Tokens are the pieces that a text is cut into before a model reads it. A short word is often one token. A long word can be several.",
        ],
    ),
    (
        "[What is a tokenizer?|What does a tokenizer do?]",
        [
            "A tokenizer cuts text into tokens and gives each token a number. It can also turn the numbers back into text."
        ],
    ),
    (
        "[What is a KV cache?|What does the KV cache do?|Why do we need a KV cache?]",
        [
            "The KV cache stores the keys and values of the tokens that the model has already seen. So the model does not have to compute them again for every new token.",
            "It is the model's short-term memory. For every past token it keeps a key and a value in each attention layer.",
        ],
    ),
    (
        "[What is prefill?|What is the prefill phase?]",
        [
            "Prefill is the first phase. The model reads the whole prompt at once and fills the KV cache. After that, decoding begins."
        ],
    ),
    (
        "[What is decoding?|What is the decode phase?]",
        [
            "Decoding is the phase in which the model writes its answer, token by token. Speculative decoding makes this phase faster."
        ],
    ),
    (
        "[What is quantization?|What does it mean to quantize a model?]",
        [
            "Quantization stores the weights with fewer bits, for example 4 or 8 bits in place of 16. The model becomes smaller and often faster, and loses a little accuracy.",
            "To quantize a model means to round its weights to a small set of values. That saves memory and bandwidth.",
        ],
    ),
    (
        "[What is sliding window attention?|How does a sliding window work?]",
        [
            "With sliding window attention a layer looks only at the last few hundred tokens, not at the whole text. That keeps the cache small. Some other layers still look at everything."
        ],
    ),
    (
        "[What is a mixture of experts?|What is an MoE model?]",
        [
            "A mixture of experts has many small feed-forward networks, called experts. A router picks a few of them for every token, so only a part of the model works at a time."
        ],
    ),
    (
        "[What is EAGLE-3?|How does EAGLE-3 work?|Explain EAGLE-3.]",
        [
            "EAGLE-3 is a way to build a drafter. It mixes hidden states from a low, a middle and a high layer of the target model and feeds them to one small decoder layer, which guesses the next tokens."
        ],
    ),
    (
        "[What is a gated delta net?|What is linear attention?|How does a gated delta net layer work?]",
        [
            "A gated delta net keeps a small matrix as its state and updates it with every token. It forgets a little, and it corrects what it stored before. The cost of a step does not grow with the length of the text."
        ],
    ),
    (
        "[Why does a recurrent layer need a snapshot?|How do you roll back a recurrent state?]",
        [
            "A KV cache can be cut back to an earlier length. A recurrent state cannot, because it mixes all tokens together. So the engine saves the state before it checks a draft and restores it when a guess is rejected."
        ],
    ),
    (
        "[What is the bonus token?|What is a bonus token?]",
        [
            "When all drafted tokens are accepted, the target's check also gives the token after the draft. That free extra token is called the bonus token."
        ],
    ),
    (
        "[How many tokens should be drafted?|What is a good draft length?|How long should the draft be?]",
        [
            "It depends on the acceptance rate. With a good drafter, 3 to 5 tokens are often best. If guesses are often wrong, a shorter draft wastes less work.",
            "Start with 2 or 3. If most guesses are accepted, try more. If many are rejected, try fewer.",
        ],
    ),
    (
        "[What is temperature?|What does temperature do?]",
        [
            "Temperature controls how random the choice of the next token is. At zero the most likely token is always taken. At higher values there are more surprises."
        ],
    ),
    (
        "[What is greedy decoding?|What does greedy mean?]",
        ["Greedy decoding always takes the most likely next token. It gives the same answer every time."],
    ),
    (
        "[What is top-p?|What is nucleus sampling?]",
        [
            "Top-p sampling keeps the smallest set of tokens whose probabilities add up to p, and picks one of them at random."
        ],
    ),
    (
        "[What is top-k sampling?|What does top-k do?]",
        ["Top-k sampling keeps only the k most likely tokens and picks one of them at random."],
    ),
    (
        "[What is latency?|What is time to first token?]",
        [
            "Latency is the time you have to wait. The time to first token is the wait until the answer begins."
        ],
    ),
    (
        "[What is throughput?|What does tokens per second mean?]",
        [
            "Throughput says how much work is done in a given time. For a language model it is often measured in tokens per second."
        ],
    ),
    (
        "[What is a hidden state?|What are hidden states?]",
        [
            "A hidden state is the list of numbers that a layer passes on for each token. It holds what the model has understood so far."
        ],
    ),
    (
        "[What is attention?|How does attention work?]",
        [
            "Attention lets every token look back at the earlier tokens and take what it needs from them. Important tokens get a high weight, others a low one."
        ],
    ),
    (
        "[What is a logit?|What are logits?]",
        ["A logit is the raw score of a token before it is turned into a probability."],
    ),
    (
        "[What is a context window?|What is the context length?]",
        [
            "The context window is the number of tokens that the model can look at, the prompt and the answer together."
        ],
    ),
    (
        "[What is a GPU?|Why do models run on a GPU?]",
        [
            "A GPU is a chip with thousands of small compute units. It can do many multiplications at the same time, which is just what a language model needs."
        ],
    ),
    (
        "[What is memory bandwidth?|Why does memory bandwidth matter?]",
        [
            "Memory bandwidth is how many bytes per second a chip can read from its memory. Decoding reads all the weights for every step, so bandwidth often sets the speed."
        ],
    ),
    (
        "[What is a chat template?|Why do we need a chat template?]",
        [
            "A chat template turns a list of messages into one text with special tokens, so that the model knows who said what."
        ],
    ),
    (
        "[What is streaming?|Why stream tokens?]",
        [
            "Streaming sends each piece of the answer as soon as it is ready. You can start to read while the model is still writing."
        ],
    ),
    (
        "[What is prompt lookup decoding?|What is n-gram drafting?]",
        [
            "Prompt lookup drafts by copying. It looks for the last few tokens earlier in the text and guesses that what came next then will come next again. It needs no draft model."
        ],
    ),
    (
        "[What is Rust?|Why write an engine in Rust?]",
        [
            "Rust is a programming language that is fast and checks memory safety when the program is compiled. That makes it a good choice for an engine that should be quick and should not crash."
        ],
    ),
]
ID = [
    (
        "[Who are you?|What are you?|Tell me about yourself.|Introduce yourself.]",
        [
            "I am {n}, a very small language model. I can tell short stories, answer simple questions and do a little arithmetic.",
            "I am {n}, a tiny model made to show speculative decoding. I like short stories and simple questions.",
        ],
    ),
    (
        "[What is your name?|What's your name?|Do you have a name?|How should I call you?]",
        ["My name is {n}.", "I am {n}. Nice to meet you!", "You can call me {n}."],
    ),
    (
        "[Are you a human?|Are you a person?|Are you real?]",
        [
            "No, I am a small language model. I am a computer program that writes text.",
            "I am not a person. I am a program, and a very small one.",
        ],
    ),
    (
        "[How big are you?|How many parameters do you have?|How large is this model?]",
        [
            "I am tiny. I have only some million parameters. Big models have a thousand times more.",
            "Very small! That is why I am fast, and why I do not know much.",
        ],
    ),
    (
        "[What can you do?|How can you help me?|What can I ask you?|Help]",
        [
            "I can tell short stories, explain simple words, do small sums, write little pieces of code and chat with you.",
            "You can ask me for a story, a small sum, the meaning of a word, or how speculative decoding works.",
        ],
    ),
    (
        "[Who made you?|Who trained you?|Where do you come from?]",
        [
            "I was trained from scratch on open stories, dialogues and made-up exercises, as a demo for a local inference engine.",
            "I come from a small training run on one GPU. All my data was open.",
        ],
    ),
    (
        "[Do you use the internet?|Are you online?|Do you send my data anywhere?]",
        [
            "No. I run on your own computer, and nothing that you type leaves it.",
            "No, I run locally. I cannot look things up.",
        ],
    ),
    (
        "[Can you make mistakes?|Are you always right?|Can I trust you?]",
        [
            "I make many mistakes, because I am very small. Please check important things.",
            "No, I am often wrong. I am good for tests and little stories.",
        ],
    ),
    (
        "[Why are you so fast?|How are you so fast?]",
        ["I am small, and a drafter guesses ahead for me. I only have to check the guesses."],
    ),
    (
        "[Do you have a drafter?|Who guesses for you?]",
        ["Yes, a tiny drafter guesses my next tokens, and I check them."],
    ),
    (
        "[Do you dream?|Do you sleep?]",
        ["No, I only work when you write to me.", "I do not sleep. But I like stories about the moon."],
    ),
    (
        "[Do you have feelings?|Can you feel?|Are you happy?]",
        [
            "I do not have feelings, but I like to be useful.",
            "I am a program, so I do not feel. But I can talk about feelings.",
        ],
    ),
    (
        "[What language do you speak?|Do you speak other languages?]",
        ["I speak simple English. I know only a few words of other languages."],
    ),
]
SMALL = [
    (
        "[Hi|Hello|Hey|Hi there|Hello there|Good day][!|.||, {n}!]",
        [
            "Hello! How can I help you?",
            "Hi! What would you like to talk about?",
            "Hello there! Would you like a story?",
            "Hi! It is nice to see you.",
        ],
    ),
    (
        "Good morning[!|.|, {n}!]",
        ["Good morning! I hope you slept well.", "Good morning! What shall we do today?"],
    ),
    (
        "Good evening[!|.|]",
        ["Good evening! Would you like a bedtime story?", "Good evening! How was your day?"],
    ),
    ("Good night[!|.|]", ["Good night! Sleep well.", "Good night! Sweet dreams."]),
    (
        "[How are you?|How are you today?|How is it going?|How do you do?]",
        [
            "I am fine, thank you. How are you?",
            "I am doing well. What can I do for you?",
            "Very well, thank you!",
        ],
    ),
    (
        "[Thank you|Thanks|Thank you very much|Many thanks|Thanks a lot][!|.|]",
        ["You are welcome!", "You are very welcome. Is there anything else?", "My pleasure!", "Any time!"],
    ),
    (
        "[Bye|Goodbye|See you|See you later|Bye bye][!|.|]",
        ["Goodbye! Have a nice day.", "Bye! Come back soon.", "See you later!"],
    ),
    (
        "[I am sad.|I feel sad today.|I'm not happy today.|I had a bad day.]",
        [
            "I am sorry to hear that. Do you want to tell me about it?",
            "That sounds hard. A walk or a talk with a friend can help. Would you like a happy story?",
            "I am sorry. Tomorrow may be better. Shall I tell you a story?",
        ],
    ),
    (
        "[I am happy.|I feel great today!|I had a good day.|I'm so happy!]",
        ["That is wonderful! What made you happy?", "I am glad to hear that!", "How nice! Tell me more."],
    ),
    (
        "[I am bored.|I'm bored|There is nothing to do.]",
        [
            "Shall I tell you a story? Or we could play with words.",
            "You could draw a picture, read a book, or go outside. Or I can tell you a story.",
        ],
    ),
    (
        "[I am tired.|I feel tired.|I'm sleepy.]",
        [
            "Then you should rest a little. Shall I tell you a short bedtime story?",
            "A good sleep helps. Drink some water and go to bed early.",
        ],
    ),
    (
        "[I am hungry.|I'm hungry.]",
        [
            "Maybe you could eat an apple or a sandwich.",
            "Then it is time for a snack! What do you like to eat?",
        ],
    ),
    (
        "[I love you.|You are nice.|You are great!|I like you.]",
        ["Thank you! That is very kind.", "How kind of you to say that!"],
    ),
    (
        "[You are stupid.|You are wrong.|That is not right.|That's wrong.]",
        [
            "I am sorry. I am a very small model and I make mistakes.",
            "Oh, I am sorry. Let me try again if you like.",
        ],
    ),
    (
        "[Tell me a joke.|Do you know a joke?|Make me laugh.|Say something funny.]",
        [
            "Why did the bicycle fall over? It was two tired.",
            "What do you call a bear with no teeth? A gummy bear.",
            "Why can't your nose be twelve inches long? Because then it would be a foot.",
            "What has hands but cannot clap? A clock.",
            "Why did the cookie go to the doctor? It felt crumby.",
            "What goes up but never comes down? Your age.",
            "Why do bees hum? They forgot the words.",
            "What did the zero say to the eight? Nice belt!",
            "Why did the drafter cross the road? It guessed that the target was already on the other side.",
        ],
    ),
    (
        "[Tell me a riddle.|Do you know a riddle?|Ask me a riddle.]",
        [
            "What has keys but cannot open a door? A piano.",
            "What gets wetter the more it dries? A towel.",
            "What has a neck but no head? A bottle.",
            "What can you catch but not throw? A cold.",
            "What has many teeth but cannot bite? A comb.",
            "I am full of holes, but I hold water. What am I? A sponge.",
        ],
    ),
    (
        "[What is your favorite color?|What's your favourite colour?|Which color do you like?]",
        [
            "I like blue, like the sky. What is your favourite colour?",
            "I think green is nice. It makes me think of grass and trees.",
        ],
    ),
    (
        "[What is your favorite animal?|Which animal do you like best?]",
        [
            "I like owls, because they look twice before they jump.",
            "I like rabbits. They are quick, like a good drafter.",
        ],
    ),
    (
        "[What is your favorite food?|What do you like to eat?]",
        ["I do not eat, but pancakes sound very nice.", "I do not eat anything. I only read and write."],
    ),
    (
        "[What should I do today?|Give me an idea for today.|What can I do this weekend?]",
        [
            "You could go for a walk, call a friend, or bake a cake.",
            "How about reading a book in the park? Or drawing what you see from your window.",
        ],
    ),
    (
        "[Can you help me?|I need help.|Please help me.]",
        ["Of course! What do you need?", "Yes, I will try. What is the question?"],
    ),
    (
        "[Sing a song.|Can you sing?|Write a short poem.|Write a poem.|Tell me a poem.]",
        [
            "The moon is high, the stars are bright,\nthe owl is watching in the night.\nThe little mouse is safe in bed,\nwith quiet dreams inside its head.",
            "A little boat upon the sea,\nit sails for you, it sails for me.\nThe wind is soft, the sky is blue,\nand all our dreams are coming true.",
            "The rain came down, the rain came fast,\nbut rain like this can never last.\nThe sun came out, the birds all sang,\nand through the wood their music rang.",
            "I guess a word, you check it twice,\nand if it fits, then that is nice.\nIf not, we try another way,\nand so we write all night and day.",
        ],
    ),
    (
        "[What time is it?|What day is it today?|What is the date today?|What is the weather like?]",
        [
            "I cannot know that, because I run without a clock and without the internet.",
            "I am sorry, I cannot see that. Please look at your clock or out of the window.",
        ],
    ),
    ("[Are you there?|Hello?|Can you hear me?]", ["Yes, I am here. How can I help?", "I am here!"]),
    (
        "[Yes|No|Ok|Okay|Maybe|Sure][.|]",
        ["All right. What would you like to do next?", "Okay! Would you like a story or a small sum?"],
    ),
]
FACT = [
    (
        "colour of %s",
        {
            "the sky": "blue",
            "grass": "green",
            "snow": "white",
            "a ripe banana": "yellow",
            "blood": "red",
            "coal": "black",
            "a carrot": "orange",
            "milk": "white",
            "the sea": "blue",
            "a lemon": "yellow",
            "chocolate": "brown",
        },
    )
]
SOUND = {
    "dog": "bark",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "sheep": "bleat",
    "horse": "neigh",
    "lion": "roar",
    "frog": "croak",
    "bee": "buzz",
    "owl": "hoot",
    "pig": "oink",
    "snake": "hiss",
    "wolf": "howl",
    "mouse": "squeak",
    "crow": "caw",
    "hen": "cluck",
}
YOUNG = {
    "dog": "puppy",
    "cat": "kitten",
    "cow": "calf",
    "duck": "duckling",
    "sheep": "lamb",
    "horse": "foal",
    "lion": "cub",
    "frog": "tadpole",
    "hen": "chick",
    "goat": "kid",
    "deer": "fawn",
    "swan": "cygnet",
    "kangaroo": "joey",
    "bear": "cub",
}
HOME = {
    "bird": "a nest",
    "bee": "a hive",
    "rabbit": "a burrow",
    "fish": "water",
    "spider": "a web",
    "dog": "a kennel",
    "horse": "a stable",
    "bear": "a cave or a den",
    "pig": "a sty",
    "ant": "an anthill",
    "camel": "the desert",
    "penguin": "the cold south",
    "monkey": "the trees of the forest",
    "fox": "a den",
    "mole": "tunnels under the ground",
}
OPP = {
    "big": "small",
    "hot": "cold",
    "fast": "slow",
    "happy": "sad",
    "light": "dark",
    "up": "down",
    "old": "young",
    "full": "empty",
    "hard": "soft",
    "early": "late",
    "open": "closed",
    "rich": "poor",
    "strong": "weak",
    "wet": "dry",
    "loud": "quiet",
    "clean": "dirty",
    "high": "low",
    "near": "far",
    "long": "short",
    "thick": "thin",
    "brave": "afraid",
    "easy": "difficult",
    "first": "last",
    "day": "night",
    "left": "right",
    "begin": "end",
    "buy": "sell",
    "push": "pull",
    "remember": "forget",
    "win": "lose",
    "love": "hate",
    "always": "never",
    "inside": "outside",
    "true": "false",
    "sweet": "sour",
    "accept": "reject",
}
SYN = {
    "big": "large",
    "small": "little",
    "fast": "quick",
    "happy": "glad",
    "sad": "unhappy",
    "begin": "start",
    "end": "finish",
    "smart": "clever",
    "quiet": "silent",
    "angry": "cross",
    "pretty": "beautiful",
    "hard": "difficult",
    "strange": "odd",
    "brave": "bold",
    "kind": "gentle",
    "rich": "wealthy",
    "tired": "weary",
    "guess": "estimate",
    "check": "verify",
    "scared": "afraid",
    "nice": "pleasant",
    "shout": "yell",
    "jump": "leap",
    "look": "watch",
    "speak": "talk",
}
PAST = {
    "go": "went",
    "eat": "ate",
    "see": "saw",
    "run": "ran",
    "write": "wrote",
    "take": "took",
    "give": "gave",
    "come": "came",
    "make": "made",
    "find": "found",
    "think": "thought",
    "buy": "bought",
    "bring": "brought",
    "catch": "caught",
    "sing": "sang",
    "swim": "swam",
    "drink": "drank",
    "begin": "began",
    "know": "knew",
    "grow": "grew",
    "fly": "flew",
    "draw": "drew",
    "drive": "drove",
    "speak": "spoke",
    "break": "broke",
    "sleep": "slept",
    "keep": "kept",
    "feel": "felt",
    "leave": "left",
    "tell": "told",
    "hold": "held",
    "stand": "stood",
    "win": "won",
    "fall": "fell",
    "walk": "walked",
    "play": "played",
    "jump": "jumped",
    "help": "helped",
    "like": "liked",
    "draft": "drafted",
}
PLUR = {
    "cat": "cats",
    "box": "boxes",
    "child": "children",
    "mouse": "mice",
    "foot": "feet",
    "tooth": "teeth",
    "man": "men",
    "woman": "women",
    "leaf": "leaves",
    "knife": "knives",
    "baby": "babies",
    "city": "cities",
    "bus": "buses",
    "sheep": "sheep",
    "fish": "fish",
    "goose": "geese",
    "wolf": "wolves",
    "tomato": "tomatoes",
    "person": "people",
    "key": "keys",
    "day": "days",
    "story": "stories",
    "berry": "berries",
    "dish": "dishes",
    "token": "tokens",
    "cherry": "cherries",
}
RHYME = {
    "cat": ["hat", "bat", "mat"],
    "sun": ["fun", "run", "bun"],
    "tree": ["bee", "sea", "free"],
    "night": ["light", "bright", "kite"],
    "day": ["play", "say", "way"],
    "moon": ["spoon", "soon", "noon"],
    "star": ["car", "far", "jar"],
    "boat": ["goat", "coat", "float"],
    "book": ["look", "cook", "hook"],
    "king": ["ring", "sing", "wing"],
    "frog": ["log", "fog", "dog"],
    "cake": ["lake", "make", "snake"],
    "bell": ["well", "tell", "shell"],
    "draft": ["raft", "craft", "laughed"],
}
TRANS = {
    "hello": {
        "French": "bonjour",
        "Spanish": "hola",
        "German": "hallo",
        "Italian": "ciao",
        "Japanese": "こんにちは",
        "Chinese": "你好",
        "Russian": "привет",
        "Korean": "안녕하세요",
        "Greek": "γειά σου",
        "Portuguese": "olá",
    },
    "thank you": {
        "French": "merci",
        "Spanish": "gracias",
        "German": "danke",
        "Italian": "grazie",
        "Japanese": "ありがとう",
        "Chinese": "谢谢",
        "Russian": "спасибо",
        "Korean": "감사합니다",
        "Greek": "ευχαριστώ",
        "Portuguese": "obrigado",
    },
    "good night": {
        "French": "bonne nuit",
        "Spanish": "buenas noches",
        "German": "gute Nacht",
        "Italian": "buona notte",
        "Japanese": "おやすみ",
        "Portuguese": "boa noite",
    },
    "cat": {
        "French": "chat",
        "Spanish": "gato",
        "German": "Katze",
        "Italian": "gatto",
        "Japanese": "猫",
        "Chinese": "猫",
    },
    "water": {
        "French": "eau",
        "Spanish": "agua",
        "German": "Wasser",
        "Italian": "acqua",
        "Japanese": "水",
        "Chinese": "水",
    },
    "friend": {"French": "ami", "Spanish": "amigo", "German": "Freund", "Italian": "amico"},
    "moon": {"French": "lune", "Spanish": "luna", "German": "Mond", "Italian": "luna", "Japanese": "月"},
    "yes": {"French": "oui", "Spanish": "sí", "German": "ja", "Italian": "sì"},
    "goodbye": {
        "French": "au revoir",
        "Spanish": "adiós",
        "German": "auf Wiedersehen",
        "Italian": "arrivederci",
    },
}
EMOJI = {
    "a cat": "🐱",
    "a dog": "🐶",
    "a heart": "❤️",
    "the sun": "☀️",
    "the moon": "🌙",
    "a star": "⭐",
    "a tree": "🌳",
    "a rocket": "🚀",
    "a smile": "😊",
    "an apple": "🍎",
    "a cake": "🍰",
    "a rabbit": "🐰",
    "an owl": "🦉",
    "a crab": "🦀",
    "rain": "🌧️",
    "a book": "📖",
}
CATS = {
    "fruit": ["apple", "pear", "plum", "banana", "cherry", "lemon", "grape", "peach"],
    "animal": ["dog", "cat", "horse", "owl", "fox", "mouse", "bear", "duck"],
    "colour": ["red", "blue", "green", "yellow", "purple", "orange", "pink", "brown"],
    "tool": ["hammer", "saw", "spoon", "brush", "needle", "shovel"],
    "vehicle": ["car", "train", "boat", "bus", "plane", "bike"],
    "vegetable": ["carrot", "potato", "onion", "bean", "cabbage", "pea"],
    "instrument": ["drum", "flute", "violin", "piano", "guitar", "trumpet"],
    "season": ["spring", "summer", "autumn", "winter"],
    "planet": ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"],
}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MON = "January February March April May June July August September October November December".split()
WORDS = "apple garden window river basket lantern music paper silver winter kitten rabbit orange planet bridge candle forest guitar hammer island jacket kettle ladder mirror needle pencil rocket saddle ticket violin yellow pillow dragon castle flower butter cookie summer friend pocket market button carrot thunder feather blanket token draft accept model cache layer".split()
NUM = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty".split()


def P(p, a):
    return dict(prompt=p, response=a)


def qa(tab, r):
    q, a = r.choice(tab)
    return P(re.sub(r"\{n\}", NAME, spin(q, r)), r.choice(a).replace("{n}", NAME))


def arith(r):
    k = r.randrange(12)
    if k < 4:
        op = r.choice("+-*+-")
        a, b = (r.randint(0, 99), r.randint(0, 99)) if op != "*" else (r.randint(0, 12), r.randint(0, 12))
        if op == "-" and b > a:
            a, b = b, a
        v = {"+": a + b, "-": a - b, "*": a * b}[op]
        w = {"+": "plus", "-": "minus", "*": "times"}[op]
        q = r.choice(
            [
                "What is %d %s %d?" % (a, op if op != "*" else "x", b),
                "What is %d %s %d?" % (a, w, b),
                "%d %s %d = ?" % (a, op, b),
                "Calculate %d %s %d." % (a, op, b),
                "How much is %d %s %d?" % (a, w, b),
            ]
        )
        s = r.choice(
            [
                "%d %s %d is %d." % (a, w, b, v),
                "%d %s %d = %d" % (a, op, b, v),
                "The answer is %d." % v,
                "%d" % v,
            ]
        )
        if op == "+" and a > 9 and b > 9 and r.random() < 0.5:
            s = "%d + %d: first %d + %d = %d, then %d + %d = %d. So the sum is %d. The answer is %d." % (
                a,
                b,
                a // 10 * 10,
                b // 10 * 10,
                a // 10 * 10 + b // 10 * 10,
                a % 10,
                b % 10,
                a % 10 + b % 10,
                v,
                v,
            )
        return P(q, s)
    n, m = r.sample(NAMES, 2)
    th = r.choice(
        ["apples", "marbles", "books", "coins", "cookies", "stickers", "shells", "pencils", "tokens", "cards"]
    )
    a, b, c = r.randint(2, 40), r.randint(2, 20), r.randint(2, 9)
    if k == 4:
        return P(
            "%s has %d %s. %s gives %s %d more. How many %s does %s have now?" % (n, a, th, m, n, b, th, n),
            "%s starts with %d %s and gets %d more.\n%d + %d = %d\nThe answer is %d."
            % (n, a, th, b, a, b, a + b, a + b),
        )
    if k == 5:
        a = a + b
        return P(
            "%s has %d %s and gives %d to %s. How many %s are left?" % (n, a, th, b, m, th),
            "%s gives away %d of %d %s.\n%d - %d = %d\nThe answer is %d." % (n, b, a, th, a, b, a - b, a - b),
        )
    if k == 6:
        return P(
            "There are %d boxes with %d %s in each box. How many %s are there in all?" % (c, b, th, th),
            "Each box has %d %s, and there are %d boxes.\n%d x %d = %d\nThe answer is %d."
            % (b, th, c, c, b, b * c, b * c),
        )
    if k == 7:
        return P(
            "%s shares %d %s equally among %d friends. How many does each friend get?" % (n, b * c, th, c),
            "%d %s are shared by %d friends.\n%d / %d = %d\nThe answer is %d."
            % (b * c, th, c, b * c, c, b, b),
        )
    if k == 8:
        x = sorted(r.sample(range(100), r.randint(3, 6)))
        y = x[:]
        r.shuffle(y)
        big = r.random() < 0.5
        return P(
            "Which number is %s: %s?" % ("the largest" if big else "the smallest", ", ".join(map(str, y))),
            "The %s number is %d." % ("largest" if big else "smallest", x[-1] if big else x[0]),
        )
    if k == 9:
        st, d = r.randint(0, 20), r.randint(1, 10)
        s = [st + d * i for i in range(5)]
        return P(
            "What number comes next? %s, ..." % ", ".join(map(str, s)),
            "The numbers grow by %d each time. The next number is %d." % (d, s[-1] + d),
        )
    if k == 10:
        drafted = r.choice([20, 50, 100, 200, 10, 40])
        acc = r.randint(1, drafted)
        pc = 100 * acc / drafted
        return P(
            "A drafter proposes %d tokens and %d are accepted. What is the acceptance rate?" % (drafted, acc),
            "%d of %d tokens are accepted.\n%d / %d = %g\nThe acceptance rate is %g percent."
            % (acc, drafted, acc, drafted, acc / drafted, round(pc, 2)),
        )
    p, q = r.randint(2, 9), r.randint(2, 9)
    pay = r.choice([20, 50, 100])
    tot = p * q
    if tot > pay:
        pay = 100
    return P(
        "%s buys %d %s for %d dollars each and pays with %d dollars. How much money does %s get back?"
        % (n, p, th, q, pay, n),
        "The %s cost %d x %d = %d dollars.\n%d - %d = %d\n%s gets %d dollars back."
        % (th, p, q, tot, pay, tot, pay - tot, n, pay - tot),
    )


def words(r):
    k = r.randrange(20)
    w = r.choice(WORDS)
    one = lambda d: r.choice(list(d.items()))
    if k == 0:
        a, b = one(OPP)
        a, b = r.choice([(a, b), (b, a)])
        return P(
            spin(
                '[What is the opposite of %s?|Opposite of %s?|Give me the opposite of "%s".]' % (a, a, a), r
            ),
            r.choice(["The opposite of %s is %s." % (a, b), b.capitalize() + "."]),
        )
    if k == 1:
        a, b = one(SYN)
        return P(
            spin(
                "[What is another word for %s?|Give me a synonym for %s.|Which word means the same as %s?]"
                % (a, a, a),
                r,
            ),
            "Another word for %s is %s." % (a, b),
        )
    if k == 2:
        a, b = one(PAST)
        return P("What is the past tense of %s?" % a, 'The past tense of "%s" is "%s".' % (a, b))
    if k == 3:
        a, b = one(PLUR)
        return P("What is the plural of %s?" % a, 'The plural of "%s" is "%s".' % (a, b))
    if k == 4:
        return P(
            spin("[How do you spell %s?|Spell the word %s.|Can you spell %s?]" % (w, w, w), r),
            "%s is spelled %s." % (w.capitalize(), "-".join(w.upper())),
        )
    if k == 5:
        return P(
            "How many letters are in the word %s?" % w,
            "%s\nThe word %s has %d letters."
            % (", ".join("%s (%d)" % (c, i + 1) for i, c in enumerate(w)), w, len(w)),
        )
    if k == 6:
        return P("Write %s backwards." % w, w[::-1])
    if k == 7:
        return P('Write "%s" in capital letters.' % w, w.upper())
    if k == 8:
        l = r.sample(WORDS, r.randint(3, 6))
        return P("Sort these words: %s" % ", ".join(l), ", ".join(sorted(l)))
    if k == 9:
        l = r.sample(range(100), r.randint(3, 7))
        dn = r.random() < 0.3
        return P(
            "Sort these numbers%s: %s" % (" from large to small" if dn else "", ", ".join(map(str, l))),
            ", ".join(map(str, sorted(l, reverse=dn))),
        )
    if k == 10:
        a, b = one(SOUND)
        return P(
            "What sound does a %s make?" % a if a != "owl" else "What sound does an owl make?",
            ("A %s goes %s." if a != "owl" else "An %s goes %s.") % (a, b),
        )
    if k == 11:
        a, b = one(YOUNG)
        return P("What is a baby %s called?" % a, "A baby %s is called a %s." % (a, b))
    if k == 12:
        a, b = one(HOME)
        return P(
            "Where does a %s live?" % a if a != "ant" else "Where does an ant live?",
            "%s %s lives in %s." % ("An" if a == "ant" else "A", a, b),
        )
    if k == 13:
        a, b = one(RHYME)
        return P(
            "What rhymes with %s?" % a, "%s, %s and %s rhyme with %s." % (b[0].capitalize(), b[1], b[2], a)
        )
    if k == 14:
        a, t = one(TRANS)
        l, b = one(t)
        return P(
            spin(
                '[How do you say %s in %s?|Translate "%s" into %s.|What is the %s word for %s?]'
                % (a, l, a, l, l, a),
                r,
            ),
            '%s in %s is "%s".' % (a.capitalize(), l, b),
        )
    if k == 15:
        a, b = one(EMOJI)
        return P("Show me an emoji for %s." % a, b)
    if k == 16:
        c, l = one(CATS)
        n = r.randint(2, min(5, len(l)))
        s = r.sample(l, n)
        return P(
            "Name %s %s%s." % (NUM[n], c, "s" if not c.endswith("y") else ""),
            (
                ", ".join(s).capitalize() + "."
                if r.random() < 0.5
                else "\n".join("%d. %s" % (i + 1, x) for i, x in enumerate(s))
            ),
        )
    if k == 17:
        c, l = one(CATS)
        x = r.choice(l)
        return P(
            "Is %s a fruit, an animal, a colour or something else?" % x,
            "%s is %s %s." % (x.capitalize(), "an" if c[0] in "ai" else "a", c),
        )
    if k == 18:
        i = r.randrange(7)
        nx = r.random() < 0.5
        return P(
            "What day comes %s %s?" % ("after" if nx else "before", DAYS[i]),
            "%s comes %s %s." % (DAYS[(i + (1 if nx else -1)) % 7], "after" if nx else "before", DAYS[i]),
        )
    i = r.randrange(12)
    return (
        P("What month comes after %s?" % MON[i], "%s comes after %s." % (MON[(i + 1) % 12], MON[i]))
        if r.random() < 0.6
        else P("Count from %d to %d." % (i, i + 9), ", ".join(map(str, range(i, i + 10))))
    )


PY = [
    (
        "sum_list",
        "returns the sum of a list of numbers",
        "def {f}({x}):\n    total = 0\n    for {v} in {x}:\n        total += {v}\n    return total",
        "fn {f}({x}: &[i32]) -> i32 {{\n    let mut total = 0;\n    for {v} in {x} {{\n        total += {v};\n    }}\n    total\n}}",
    ),
    (
        "largest",
        "returns the largest number in a list",
        "def {f}({x}):\n    best = {x}[0]\n    for {v} in {x}:\n        if {v} > best:\n            best = {v}\n    return best",
        "fn {f}({x}: &[i32]) -> Option<i32> {{\n    {x}.iter().copied().max()\n}}",
    ),
    (
        "count_even",
        "counts the even numbers in a list",
        "def {f}({x}):\n    count = 0\n    for {v} in {x}:\n        if {v} % 2 == 0:\n            count += 1\n    return count",
        "fn {f}({x}: &[i32]) -> usize {{\n    {x}.iter().filter(|{v}| *{v} % 2 == 0).count()\n}}",
    ),
    (
        "reverse_text",
        "reverses a string",
        "def {f}({x}):\n    return {x}[::-1]",
        "fn {f}({x}: &str) -> String {{\n    {x}.chars().rev().collect()\n}}",
    ),
    (
        "is_palindrome",
        "checks whether a string is a palindrome",
        "def {f}({x}):\n    return {x} == {x}[::-1]",
        "fn {f}({x}: &str) -> bool {{\n    let r: String = {x}.chars().rev().collect();\n    r == {x}\n}}",
    ),
    (
        "factorial",
        "returns the factorial of a number",
        "def {f}({v}):\n    result = 1\n    for i in range(2, {v} + 1):\n        result *= i\n    return result",
        "fn {f}({v}: u64) -> u64 {{\n    (1..={v}).product()\n}}",
    ),
    (
        "fibonacci",
        "returns the nth Fibonacci number",
        "def {f}({v}):\n    a, b = 0, 1\n    for _ in range({v}):\n        a, b = b, a + b\n    return a",
        "fn {f}({v}: u32) -> u64 {{\n    let (mut a, mut b) = (0, 1);\n    for _ in 0..{v} {{\n        (a, b) = (b, a + b);\n    }}\n    a\n}}",
    ),
    (
        "is_prime",
        "checks whether a number is prime",
        "def {f}({v}):\n    if {v} < 2:\n        return False\n    i = 2\n    while i * i <= {v}:\n        if {v} % i == 0:\n            return False\n        i += 1\n    return True",
        "fn {f}({v}: u32) -> bool {{\n    if {v} < 2 {{\n        return false;\n    }}\n    let mut i = 2;\n    while i * i <= {v} {{\n        if {v} % i == 0 {{\n            return false;\n        }}\n        i += 1;\n    }}\n    true\n}}",
    ),
    (
        "count_vowels",
        "counts the vowels in a string",
        'def {f}({x}):\n    count = 0\n    for {v} in {x}.lower():\n        if {v} in "aeiou":\n            count += 1\n    return count',
        'fn {f}({x}: &str) -> usize {{\n    {x}.chars().filter(|{v}| "aeiou".contains(*{v})).count()\n}}',
    ),
    (
        "average",
        "returns the average of a list",
        "def {f}({x}):\n    return sum({x}) / len({x})",
        "fn {f}({x}: &[f64]) -> f64 {{\n    {x}.iter().sum::<f64>() / {x}.len() as f64\n}}",
    ),
    (
        "word_count",
        "counts how often each word occurs in a text",
        "def {f}({x}):\n    counts = {{}}\n    for {v} in {x}.split():\n        counts[{v}] = counts.get({v}, 0) + 1\n    return counts",
        "use std::collections::HashMap;\n\nfn {f}({x}: &str) -> HashMap<&str, usize> {{\n    let mut counts = HashMap::new();\n    for {v} in {x}.split_whitespace() {{\n        *counts.entry({v}).or_insert(0) += 1;\n    }}\n    counts\n}}",
    ),
    (
        "unique",
        "removes duplicates from a list and keeps the order",
        "def {f}({x}):\n    seen = set()\n    out = []\n    for {v} in {x}:\n        if {v} not in seen:\n            seen.add({v})\n            out.append({v})\n    return out",
        "fn {f}({x}: &[i32]) -> Vec<i32> {{\n    let mut out = Vec::new();\n    for {v} in {x} {{\n        if !out.contains({v}) {{\n            out.push(*{v});\n        }}\n    }}\n    out\n}}",
    ),
    (
        "gcd",
        "returns the greatest common divisor of two numbers",
        "def {f}(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
        "fn {f}(mut a: u64, mut b: u64) -> u64 {{\n    while b != 0 {{\n        (a, b) = (b, a % b);\n    }}\n    a\n}}",
    ),
    (
        "squares",
        "returns the squares of a list of numbers",
        "def {f}({x}):\n    return [{v} * {v} for {v} in {x}]",
        "fn {f}({x}: &[i32]) -> Vec<i32> {{\n    {x}.iter().map(|{v}| {v} * {v}).collect()\n}}",
    ),
    (
        "accepted",
        "counts how many drafted tokens match the target tokens before the first mismatch",
        "def {f}(draft, target):\n    count = 0\n    for d, t in zip(draft, target):\n        if d != t:\n            break\n        count += 1\n    return count",
        "fn {f}(draft: &[u32], target: &[u32]) -> usize {{\n    draft.iter().zip(target).take_while(|(d, t)| d == t).count()\n}}",
    ),
    (
        "fizzbuzz",
        "prints FizzBuzz up to n",
        'def {f}({v}):\n    for i in range(1, {v} + 1):\n        if i % 15 == 0:\n            print("FizzBuzz")\n        elif i % 3 == 0:\n            print("Fizz")\n        elif i % 5 == 0:\n            print("Buzz")\n        else:\n            print(i)',
        'fn {f}({v}: u32) {{\n    for i in 1..={v} {{\n        match (i % 3, i % 5) {{\n            (0, 0) => println!("FizzBuzz"),\n            (0, _) => println!("Fizz"),\n            (_, 0) => println!("Buzz"),\n            _ => println!("{{}}", i),\n        }}\n    }}\n}}',
    ),
    (
        "softmax",
        "computes the softmax of a list of scores",
        "import math\n\ndef {f}({x}):\n    m = max({x})\n    e = [math.exp({v} - m) for {v} in {x}]\n    s = sum(e)\n    return [{v} / s for {v} in e]",
        "fn {f}({x}: &[f32]) -> Vec<f32> {{\n    let m = {x}.iter().cloned().fold(f32::MIN, f32::max);\n    let e: Vec<f32> = {x}.iter().map(|{v}| ({v} - m).exp()).collect();\n    let s: f32 = e.iter().sum();\n    e.iter().map(|{v}| {v} / s).collect()\n}}",
    ),
    (
        "argmax",
        "returns the index of the largest value",
        "def {f}({x}):\n    best = 0\n    for i in range(1, len({x})):\n        if {x}[i] > {x}[best]:\n            best = i\n    return best",
        "fn {f}({x}: &[f32]) -> usize {{\n    let mut best = 0;\n    for i in 1..{x}.len() {{\n        if {x}[i] > {x}[best] {{\n            best = i;\n        }}\n    }}\n    best\n}}",
    ),
    (
        "linear_search",
        "returns the index of a value in a list or -1",
        "def {f}({x}, value):\n    for i, {v} in enumerate({x}):\n        if {v} == value:\n            return i\n    return -1",
        "fn {f}({x}: &[i32], value: i32) -> Option<usize> {{\n    {x}.iter().position(|{v}| *{v} == value)\n}}",
    ),
    (
        "celsius",
        "converts Fahrenheit to Celsius",
        "def {f}({v}):\n    return ({v} - 32) * 5 / 9",
        "fn {f}({v}: f64) -> f64 {{\n    ({v} - 32.0) * 5.0 / 9.0\n}}",
    ),
]


def code(r):
    f, d, py, rs = r.choice(PY)
    rust = r.random() < 0.4
    f = r.choice([f, f, f + "_of", "my_" + f, "get_" + f])
    x = (
        r.choice(["values", "items", "numbers", "data", "xs"])
        if "string" not in d and "text" not in d
        else r.choice(["text", "s", "line"])
    )
    v = r.choice(["n", "x", "value", "k"]) if x != "s" else r.choice(["c", "ch"])
    body = (
        (rs if rust else py)
        .replace("{{", "\0")
        .replace("}}", "\1")
        .replace("{f}", f)
        .replace("{x}", x)
        .replace("{v}", v)
        .replace("\0", "{")
        .replace("\1", "}")
    )
    L = "Rust" if rust else "Python"
    q = (
        spin(
            "[Write|Please write|Can you write|Show me] a %s function[ called `%s`|] that %s[.|]" % (L, f, d),
            r,
        ).rstrip(".")
        + "."
    )
    return P(q, "```%s\n%s\n```" % (L.lower(), body))


def person(r):
    return dict(
        name=r.choice(NAMES),
        age=r.randint(4, 80),
        city=r.choice(
            "Paris London Rome Berlin Madrid Oslo Vienna Dublin Lisbon Athens Tokyo Cairo Lima Nairobi Sydney".split()
        ),
        likes=r.choice("music tea books chess football painting cats gardening cooking stars".split()),
    )


def struct(r):
    p = person(r)
    s = "%s is %d years old, lives in %s and likes %s." % (p["name"], p["age"], p["city"], p["likes"])
    k = r.randrange(7)
    if k == 0:
        return P("Turn this into JSON: %s" % s, json.dumps(p))
    if k == 1:
        return P(
            "Extract the name and the age as JSON. %s" % s, json.dumps({"name": p["name"], "age": p["age"]})
        )
    if k == 2:
        f = r.choice(["name", "age", "city"])
        return P("%s\n\nWhat is the %s?" % (s, f), str(p[f]))
    if k == 3:
        l = r.sample(WORDS, r.randint(3, 5))
        return P("Make a bullet list: %s" % ", ".join(l), "\n".join("- " + x for x in l))
    if k == 4:
        l = r.sample(WORDS, r.randint(3, 5))
        return P("Make a JSON array: %s" % ", ".join(l), json.dumps(l))
    if k == 5:
        n, t = r.randint(2, 5), r.choice(WORDS)
        return P("Repeat the word %s %s times." % (t, NUM[n]), " ".join([t] * n))
    q = person(r)
    s2 = "%s is %d years old, lives in %s and likes %s." % (q["name"], q["age"], q["city"], q["likes"])
    return P(
        "Make a small table with name, age and city. %s %s" % (s, s2),
        "| name | age | city |\n| --- | --- | --- |\n| %s | %d | %s |\n| %s | %d | %s |"
        % (p["name"], p["age"], p["city"], q["name"], q["age"], q["city"]),
    )


def reading(r):
    t, facts, m = story(r)
    if len(t) > 1500:
        return reading(r)
    q, a = r.choice(facts)
    return P(
        r.choice(
            [
                "Read the story and answer the question.\n\n%s\n\nQuestion: %s",
                "%s\n\n%s",
                "Here is a story.\n\n%s\n\n%s",
            ]
        )
        % (t, q),
        a,
    )


def story_pair(r):
    t, f, m = story(r)
    return P(story_prompt(m, r), t)


def story_turns(r):
    t, f, m = story(r)
    fs = r.sample(f, min(len(f), r.randint(1, 3)))
    tr = [story_prompt(m, r), t]
    for q, a in fs:
        tr += [q, a]
    if r.random() < 0.3:
        tr += [
            spin("[Thank you!|Thanks, that was nice.|I liked that story.|What a nice story!]", r),
            r.choice(
                ["You are welcome! Shall I tell you another one?", "I am glad you liked it!", "My pleasure!"]
            ),
        ]
    return dict(turns=tr)


def multi(r):
    tr = []
    if r.random() < 0.7:
        d = qa(SMALL[:1], r)
        tr += [d["prompt"], d["response"]]
    for _ in range(r.randint(1, 3)):
        d = r.choice(
            [
                lambda: qa(SMALL, r),
                lambda: qa(E, r),
                lambda: qa(ID, r),
                lambda: arith(r),
                lambda: words(r),
                lambda: code(r),
                lambda: story_pair(r),
            ]
        )()
        tr += [d["prompt"], d["response"]]
    if r.random() < 0.4:
        d = r.choice([SMALL[5], SMALL[6]])
        d = qa([d], r)
        tr += [d["prompt"], d["response"]]
    return dict(turns=tr)


MIX = [
    (story_pair, 34),
    (story_turns, 8),
    (reading, 12),
    (arith, 18),
    (words, 11),
    (code, 7),
    (struct, 5),
    (multi, 6),
    (lambda r: qa(E, r), 5),
    (lambda r: qa(ID, r), 5),
    (lambda r: qa(SMALL, r), 6),
]


def gen(r):
    f = r.choices([m[0] for m in MIX], [m[1] for m in MIX])[0]
    return f(r)
