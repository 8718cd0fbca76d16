"""The built-in texts: short and long, plain, numeric, code and other scripts, so that batches are even and padded."""

from __future__ import annotations

PARAGRAPH = (
    "The ferry left the harbour at ten past six, an hour after the fog had lifted. On the upper deck a school class "
    "was counting gulls; below, two engineers argued about a pump that had been repaired twice since spring and still "
    "lost pressure whenever the sea was rough. Nobody paid attention to the old man by the railing, who wrote down the "
    "time of each buoy they passed, as he had done on every crossing for thirty years. When the captain asked him what "
    "he meant to do with so many numbers, he said that the currents were changing, and that somebody would care. "
)

# In fours: a batch of short ones, a batch that needs much padding, a batch of long ones.
PLAIN = (
    "Hello, how are you today?",
    "The capital of France is",
    "Water boils at one hundred degrees.",
    "She opened the door and",
    "Yes.",
    PARAGRAPH,
    "In 1969 the mission travelled 384,400 km in 75 hours; 3.14159 * 2^16 = 205,887.4, or 0.000015 of it.",
    "def mean(values):\n    total = 0.0\n    for v in values:\n        total += v\n    return total / len(values)\n",
    "Der Zug nach Köln hat heute vierzig Minuten Verspätung. Le musée est fermé le lundi. El niño compró tres "
    "manzanas. 今日は天気がいいですね。 Поезд отправляется в полдень. 🙂",
    PARAGRAPH + "Question: what did the old man write down, and why did he think that it would be of use to anybody?",
    '{"id": 48151, "name": "pump-2", "pressure": [3.91, 3.87, 0.02, 3.9], "ok": false, "note": "see the log of May 4"}',
    "A recipe for bread: flour, water, salt, yeast. " * 8 + PARAGRAPH,
)

# What the T5 family was taught to expect: the task comes first.
T5_STYLE = (
    "translate English to German: The house is wonderful.",
    "translate English to French: Where is the station?",
    "cola sentence: The course is jumping well.",
    "translate English to Romanian: It is raining.",
    "summarize: Yes.",
    "summarize: " + PARAGRAPH,
    "translate English to German: In 1969 the mission travelled 384,400 km in 75 hours.",
    "question: How many minutes late was it? context: The train to Cologne was forty minutes late on Monday.",
    "translate English to French: " + PARAGRAPH,
    "summarize: " + PARAGRAPH + PARAGRAPH,
    "stsb sentence1: A man is playing a flute. sentence2: Somebody plays an instrument.",
    "summarize: " + "A recipe for bread: flour, water, salt, yeast. " * 8,
)
T5_FAMILY = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers", "t5gemma", "t5gemma2"})


def built_in(model_type: str) -> tuple[str, ...]:
    """Return the twelve built-in texts for a model of `model_type`."""
    return T5_STYLE if model_type in T5_FAMILY else PLAIN
