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


OTHER_PARAGRAPH = (
    "When the library moved to the old brewery, nobody had counted the books for eleven years. Two students and a "
    "retired surveyor did it in nine weeks, shelf by shelf, with a handcart and a list of four hundred pages. "
    "They found 61,204 volumes, a nest of swifts, and a letter from 1887 in which the first librarian asks the council "
    "for a stove. The council had answered, on the back of the same sheet, that reading keeps people warm enough. "
)

# What the search for a remedy never sees: of the same kinds, in the same order.
PLAIN_HELD_BACK = (
    "Could you tell me the way to the museum?",
    "The longest river in Africa is",
    "Iron melts at about fifteen hundred degrees.",
    "He closed the window because",
    "No.",
    OTHER_PARAGRAPH,
    "Between 2004 and 2011 the price rose from 17.25 to 1,048.60, by a factor of 60.8; 2^24 = 16,777,216.",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n",
    "Die Brücke wird bis März repariert. Où avez-vous acheté ce livre ? La lluvia no paró en toda la noche. "
    "電車は時間どおりに着きました。 Мы встретимся после обеда. 🌧️",
    OTHER_PARAGRAPH + "Question: what did the council answer, and on what?",
    '{"order": 7731, "items": [{"sku": "B-9", "count": 3}, {"sku": "K-1", "count": 12}], "paid": true, "total": 418.5}',
    "A list for the journey: tent, rope, lamp, matches. " * 8 + OTHER_PARAGRAPH,
)
T5_HELD_BACK = (
    "translate English to German: The garden is quiet.",
    "translate English to French: How much is this?",
    "cola sentence: The book was put by her the table on.",
    "translate English to Romanian: The train is late.",
    "summarize: No.",
    "summarize: " + OTHER_PARAGRAPH,
    "translate English to German: Between 2004 and 2011 the price rose from 17.25 to 1,048.60.",
    "question: How many volumes did they find? context: They found 61,204 volumes, a nest of swifts, and a letter.",
    "translate English to French: " + OTHER_PARAGRAPH,
    "summarize: " + OTHER_PARAGRAPH + OTHER_PARAGRAPH,
    "stsb sentence1: Two dogs run over a field. sentence2: Animals are running outside.",
    "summarize: " + "A list for the journey: tent, rope, lamp, matches. " * 8,
)


def held_back(model_type: str) -> tuple[str, ...]:
    """Return twelve other built-in texts for a model of `model_type`, on which a remedy is proven."""
    return T5_HELD_BACK if model_type in T5_FAMILY else PLAIN_HELD_BACK
