"""Natural English from a seed: a small grammar, so that prompts look and tokenise like real ones.

Owns the words. Must not know workloads or tokenisers; lengths in tokens are estimates by words.
"""

from __future__ import annotations

import json
import random

TOKENS_PER_WORD = 1.35
"""About what byte-pair vocabularies of 30,000 to 150,000 entries take for this text, punctuation included."""


def _options(text: str) -> list[str]:
    return text.split("|")


SUBJECTS = _options(
    "the night shift|a junior engineer|the harbour office|our supplier|the archive|the second team|a visiting auditor|"
    "the control room|the district nurse|the translation desk|an unknown caller|the maintenance crew|the board|"
    "a returning customer|the survey group|the library|the regional manager|the test bench|the field station|"
    "the records clerk|the river authority|a small bakery|the school committee|the night train|the ferry company"
)
VERBS = _options(
    "reported|checked|repaired|postponed|questioned|measured|renamed|archived|delivered|rejected|approved|counted|"
    "inspected|compared|documented|replaced|reviewed|summarised|cancelled|restored|requested|forwarded|collected|"
    "explained|recorded|moved|ordered|verified|corrected|published"
)
ADJECTIVES = _options(
    "damaged|annual|wooden|overdue|bright|second|narrow|official|missing|quiet|heavy|older|temporary|northern|blue|"
    "handwritten|broken|large|preliminary|unsigned|rusty|shared|early|internal|public|slow|confidential|short|"
    "expensive|portable"
)
NOUNS = _options(
    "shipment|report|valve|ticket|invoice|bridge|contract|sensor|timetable|ledger|generator|warehouse|map|sample|"
    "engine|drawing|complaint|schedule|cable|parcel|permit|catalogue|lantern|manuscript|pump|certificate|backup|"
    "window|tablet|crate|letter|manual|battery|gauge|container|notice|index|roof|delivery|password"
)
PLACES = _options(
    "in the east wing|near the old mill|at the harbour|on platform four|behind the depot|in the basement|"
    "at headquarters|along the coast road|in building C|at the northern gate|beside the canal|in the reading room|"
    "above the workshop|on the third floor|at the border crossing|in the cold store"
)
TIMES = _options(
    "on Monday morning|before the audit|after the storm|last week|during the night|at half past nine|in early spring|"
    "twice this month|on the day of the fair|an hour later|since the upgrade|before lunch|on 14 March|at the weekend|"
    "by the end of the quarter|while nobody was looking"
)
REASONS = _options(
    "because the label had come off|since nobody had signed for it|although the figures did not add up|"
    "so that the work could go on|because two entries had the same number|as the rules require|"
    "even though the price had doubled|since the key was kept elsewhere|because the weather had turned|"
    "so the old procedure still applies|although a second opinion was pending|since the deadline had passed"
)
OPENERS = _options(
    "According to the log,|For the record,|As far as we know,|In short,|To everyone's surprise,|Once again,|"
    "As agreed,|In the meantime,|For safety reasons,|By mistake,|As a first step,|On closer inspection,"
)
NAMES = _options(
    "Amara|Bruno|Chiara|Dmitri|Elif|Farid|Greta|Hiro|Ines|Jonas|Kamala|Liam|Mei|Nadia|Oskar|Priya|Quentin|Rosa|Samir|"
    "Tova|Ulrich|Vera|Wanda|Yusuf|Zofia"
)
ACTIONS = _options(
    "search|list|create|update|delete|fetch|compare|export|validate|schedule|cancel|assign|merge|archive|translate"
)
OBJECTS = _options(
    "orders|tickets|files|contacts|invoices|bookings|sensors|reports|messages|accounts|shipments|calendars|routes|"
    "permits|devices"
)
QUESTIONS = _options(
    "What changed compared with the previous {noun}, and does it matter for {name}?|"
    "Please find out who {verb} the {adjective} {noun} {place}.|"
    "Which {noun} should be handled first, and why?|"
    "Summarise what is known about the {adjective} {noun} in two sentences.|"
    "Could you check whether the {noun} {place} was {verb} {time}?|"
    "List the open points about the {noun} that {name} asked for.|"
    "Draft a short note to {name} about the {adjective} {noun}."
)


class TextModel:
    """Sentences, questions, tools and records, all from one seed. Two models with the same seed say the same."""

    def __init__(self, *seed: object) -> None:
        self._random = random.Random("/".join(map(str, seed)))

    def pick(self, options: list[str]) -> str:
        """One of the options."""
        return self._random.choice(options)

    def integer(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return self._random.randint(low, high)

    def sentence(self) -> str:
        """One statement of 8 to 25 words."""
        roll = self._random.random
        words = [self.pick(OPENERS)] if roll() < 0.25 else []
        subject = self.pick(SUBJECTS) if roll() < 0.75 else self.pick(NAMES)
        words.append(subject if words else subject[0].upper() + subject[1:])
        words.append(f"{self.pick(VERBS)} the {self.pick(ADJECTIVES)} {self.pick(NOUNS)}")
        if roll() < 0.3:
            words.append(f"and {self.integer(2, 480)} {plural(self.pick(NOUNS))}")
        if roll() < 0.6:
            words.append(self.pick(PLACES))
        if roll() < 0.5:
            words.append(self.pick(TIMES))
        text = " ".join(words)
        return f"{text}, {self.pick(REASONS)}." if roll() < 0.35 else f"{text}."

    def prose(self, tokens: int) -> str:
        """Paragraphs of about `tokens` tokens; none for 0 or less."""
        budget = tokens / TOKENS_PER_WORD
        paragraphs: list[list[str]] = [[]]
        while budget > 0:
            sentence = self.sentence()
            words = sentence.split()
            if budget < len(words):
                sentence = " ".join(words[: max(1, round(budget))]).rstrip(",.") + "."
            budget -= len(words)
            paragraphs[-1].append(sentence)
            if len(paragraphs[-1]) >= 6 and self._random.random() < 0.4:
                paragraphs.append([])
        return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs if paragraph)

    def question(self, tokens: int = 0) -> str:
        """A request to an assistant, led in by prose so that it has about `tokens` tokens in all."""
        asked = self.pick(QUESTIONS).format(
            noun=self.pick(NOUNS),
            adjective=self.pick(ADJECTIVES),
            verb=self.pick(VERBS),
            place=self.pick(PLACES),
            time=self.pick(TIMES),
            name=self.pick(NAMES),
        )
        lead = self.prose(tokens - int(len(asked.split()) * TOKENS_PER_WORD))
        return f"{lead} {asked}" if lead else asked

    def tool(self) -> dict[str, object]:
        """The schema of a tool, as OpenAI's `tools` field has it."""
        action, thing = self.pick(ACTIONS), self.pick(OBJECTS)
        properties = {
            f"{self.pick(NOUNS)}_{kind}": {"type": kind, "description": self.sentence()}
            for kind in ("string", "integer", "boolean")[: self.integer(1, 3)]
        }
        return {
            "type": "function",
            "function": {
                "name": f"{action}_{thing}",
                "description": f"{action.capitalize()} {thing}. {self.sentence()}",
                "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]},
            },
        }

    def tools(self, tokens: int) -> list[dict[str, object]]:
        """Schemas of different tools, about `tokens` tokens of JSON in all."""
        tools: dict[str, dict[str, object]] = {}
        while tokens > 0 and len(tools) < len(ACTIONS) * len(OBJECTS):
            tool = self.tool()
            function = tool["function"]
            assert isinstance(function, dict)
            tokens -= json_tokens(tool)
            tools.setdefault(str(function["name"]), tool)
        return list(tools.values())

    def tool_result(self, tokens: int) -> str:
        """JSON as a tool returns it: records of about `tokens` tokens in all."""
        records: list[dict[str, object]] = []
        while not records or tokens > 0:
            record: dict[str, object] = {
                "id": self.integer(1000, 99999),
                "item": f"{self.pick(ADJECTIVES)} {self.pick(NOUNS)}",
                "owner": self.pick(NAMES),
                "note": self.sentence(),
            }
            records.append(record)
            tokens -= json_tokens(record)
        return json.dumps({"status": "ok", "results": records})

    def page(self, tokens: int) -> str:
        """An HTML page about some items, of about `tokens` tokens."""
        title = f"{self.pick(ADJECTIVES)} {self.pick(NOUNS)} {self.pick(PLACES)}"
        rows: list[str] = []
        left = tokens - 60
        while not rows or left > 0:
            price = f"{self.integer(3, 900)}.{self.integer(0, 99):02d}"
            name = f'<h2>{self.pick(NOUNS)}</h2><span class="price">{price}</span>'
            row = f'<div class="item">{name}<p>{self.sentence()}</p></div>'
            rows.append(row)
            left -= json_tokens(row)
        body = "\n".join(rows)
        return f"<html><head><title>{title}</title></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>"


def plural(noun: str) -> str:
    """The plural of one of NOUNS."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith("x") else "s")


def json_tokens(value: object) -> int:
    """About how many tokens a value takes as JSON or markup: one for every 3.4 characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return max(1, round(len(text) / 3.4))
