"""Text that reads like prompts of real applications, made from word lists by a seeded generator.

No two documents or questions of one seed are alike, and none of them is anybody's: they are made
of the lists below. `planted_prompts.py` makes requests of them.
"""

from __future__ import annotations

import json
import random
from typing import Any, Final

Body = dict[str, Any]
"""What a client posts to ``/v1/chat/completions``."""

_SUBJECTS: Final = (
    *("the customer", "a caller", "the account owner", "our billing team", "the warehouse"),
    *("the on-call engineer", "a new employee", "the reviewer", "the data pipeline"),
    *("the mobile app", "the checkout page", "a returning visitor", "the scheduler"),
    *("the storage cluster", "the finance department", "a partner agency", "the courier"),
    *("the hotel desk", "the build server", "the search service", "a premium subscriber"),
    *("the laboratory", "the insurance carrier", "the patient portal", "the fleet manager"),
    *("a junior analyst", "the regional office", "the compliance officer", "the gateway"),
)
_VERBS: Final = (
    *("reports", "confirms", "asks about", "delays", "cancels", "reviews", "updates", "rejects"),
    *("forwards", "archives", "compares", "schedules", "retries", "documents", "escalates"),
    *("validates", "exports", "duplicates", "summarizes", "corrects", "monitors", "replaces"),
    *("inspects", "approves", "postpones", "collects", "measures", "restores", "audits"),
)
_OBJECTS: Final = (
    *("the monthly invoice", "a damaged parcel", "the refund request", "the access token"),
    *("an expired certificate", "the quarterly forecast", "a duplicate order", "the backup job"),
    *("the shipping address", "the retention policy", "a failed deployment", "the audit log"),
    *("the travel itinerary", "a missing attachment", "the loyalty balance", "the test report"),
    *("the contract draft", "an unusual login", "the inventory count", "the rate limit"),
    *("the sensor calibration", "a late payment", "the onboarding checklist", "the cache key"),
    *("the exchange rate", "a pending migration", "the service agreement", "the error budget"),
    *("the seating plan", "a warranty claim", "the index rebuild", "the safety notice"),
)
_CIRCUMSTANCES: Final = (
    *("before the end of the week", "without telling the other team", "in the staging area"),
    *("because the deadline has moved", "after two attempts", "during the maintenance window"),
    *("as soon as the form is signed", "when the queue is empty", "on behalf of the manager"),
    *("with a short explanation", "under the old agreement", "in a separate spreadsheet"),
    *("while the office is closed", "at no extra charge", "once the numbers agree"),
    *("for the second time this quarter", "through the public interface", "by hand"),
    *("unless somebody objects", "within three working days", "from a shared terminal"),
    *("despite the warning", "in the customer's own language", "with the original receipt"),
)
_QUESTIONS: Final = (
    *("How do I find out whether {s} {v} {o}?", "What happens if {s} {v} {o} {c}?"),
    *("Can you explain why {s} {v} {o}?", "Please draft a reply: {s} {v} {o} {c}."),
    *("Who is responsible when {s} {v} {o} {c}?", "List the steps after {s} {v} {o}."),
    *("Is it normal that {s} {v} {o} {c}?", "Summarize the case in which {s} {v} {o}."),
)
_RULES: Final = (
    *("Never promise anything about {o} that you cannot verify.", "If {s} {v} {o}, say so first."),
    *("Keep answers short unless {s} asks for detail.", "Always mention {o} {c}."),
    *("When in doubt, ask one question about {o} before you answer.", "Do not guess {o}."),
    *("Quote the relevant line whenever {s} {v} {o}.", "Escalate if {s} {v} {o} {c}."),
    *("Use plain words; {s} may read the answer {c}.", "Treat {o} as confidential."),
)
_ROLES: Final = (
    *("customer support assistant", "travel planner", "senior software engineer"),
    *("legal research assistant", "data analyst", "medical intake assistant", "writing tutor"),
    *("procurement advisor", "release manager", "knowledge base librarian"),
)
_COMPANIES: Final = (
    *("Northwind Freight", "Halden Insurance", "Birchwood Clinics", "Solara Energy"),
    *("Quarry Software", "Marlow & Finch", "Bluefjord Travel", "Copperline Bank"),
    *("Atlas Robotics", "Tidewater Foods", "Verdant Grid", "Lumen Press"),
)
_FIRST_NAMES: Final = (
    *("Maria", "Jonas", "Aisha", "Tomás", "Ingrid", "Wei", "Priya", "Samuel", "Chloé", "Dmitri"),
    *("Fatima", "Liam", "Noor", "Elena", "Kwame", "Sofia", "Hiro", "Anders", "Leila", "Marcus"),
)
_LAST_NAMES: Final = (
    *("Lopez", "Schneider", "Okafor", "García", "Lindqvist", "Chen", "Raman", "Whitfield"),
    *("Dubois", "Petrov", "Haddad", "O'Neill", "Rossi", "Mensah", "Tanaka", "Berg", "Novak"),
)
_NOUNS: Final = (
    *("invoice", "ticket", "shipment", "deployment", "booking", "policy", "sensor", "contract"),
    *("customer", "repository", "report", "payment", "schedule", "warehouse", "document"),
)
_ACTIONS: Final = ("search", "create", "update", "cancel", "list", "export", "verify", "archive")
_FIELDS: Final = (
    *("query", "limit", "status", "owner", "region", "priority", "due_by", "format", "notes"),
    *("currency", "language", "page", "include_closed", "reference", "category"),
)
_TYPES: Final = ("string", "integer", "boolean", "number")


def chat_body(*messages: tuple[str, str], **fields: object) -> Body:
    """Returns a chat request of roles and contents."""
    plain = [{"role": role, "content": content} for role, content in messages]
    return {"model": "planted", "messages": plain, **fields}


class TextMaker:
    """Makes text; the same random numbers make the same text."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def sentence(self) -> str:
        """A statement."""
        first = self._fill("{s} {v} {o}")
        second = self._fill("{s} {v} {o} {c}")
        joint = self._rng.choice((", and ", ", but ", "; later ", ", although "))
        text = (
            first + joint + second if self._rng.random() < 0.5 else self._fill("{s} {v} {o} {c}")
        )
        return text[0].upper() + text[1:] + "."

    def paragraph(self, num_sentences: int) -> str:
        """Some statements in a row."""
        return " ".join(self.sentence() for _ in range(num_sentences))

    def question(self) -> str:
        """What a user asks, with a detail or two."""
        text = self._fill(self._rng.choice(_QUESTIONS))
        if self._rng.random() < 0.6:
            text += " " + self.sentence()
        if self._rng.random() < 0.3:
            text += f" It is about number {self._rng.randrange(10, 99_999)}."
        return text

    def system(self, num_rules: int) -> list[str]:
        """A system prompt, as paragraphs: who it is, what it is for, its rules, its format."""
        rng = self._rng
        role, company = rng.choice(_ROLES), rng.choice(_COMPANIES)
        rules = [self._fill(rng.choice(_RULES)) for _ in range(num_rules)]
        bullet = rng.choice(("- ", "* ", "{n}. ", "({n}) "))
        return [
            f"You are a {role} at {company}. {self.paragraph(2)}",
            self.paragraph(rng.randint(2, 5)),
            "Rules:\n"
            + "\n".join(
                bullet.format(n=n) + rule[0].upper() + rule[1:]
                for n, rule in enumerate(rules, start=1)
            ),
            f"Answer in {rng.choice(('plain text', 'Markdown', 'JSON'))}. {self.paragraph(2)}",
        ]

    def document(self, num_sentences: int) -> tuple[str, str]:
        """A title and a text with some figures in it."""
        rng = self._rng
        sentences = [self.sentence() for _ in range(num_sentences)]
        at = rng.randrange(num_sentences)
        sentences[at] += (
            f" In {rng.randint(1995, 2025)}, {rng.randrange(3, 900)} cases cost "
            f"{rng.randrange(100, 99_999)} in total."
        )
        title = self._fill("{o}").removeprefix("the ").removeprefix("a ").removeprefix("an ")
        return f"{title.capitalize()}, part {rng.randrange(1, 400)}", " ".join(sentences)

    def tool(self) -> dict[str, object]:
        """A function that the model may call, as in the OpenAI API."""
        rng = self._rng
        fields = rng.sample(_FIELDS, rng.randint(3, 6))
        properties = {
            name: {"type": rng.choice(_TYPES), "description": self.sentence()} for name in fields
        }
        return {
            "type": "function",
            "function": {
                "name": f"{rng.choice(_ACTIONS)}_{rng.choice(_NOUNS)}_{rng.randrange(100)}",
                "description": self.sentence(),
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": fields[:2],
                },
            },
        }

    def tool_output(self) -> str:
        """What a tool returned: JSON, or lines as a shell prints them."""
        rng = self._rng
        if rng.random() < 0.5:
            rows = [
                {
                    "id": rng.randrange(1000, 9999),
                    "status": rng.choice(_VERBS),
                    "note": self.sentence(),
                }
                for _ in range(rng.randint(2, 5))
            ]
            return json.dumps(rows)
        return "\n".join(
            f"-rw-r--r-- 1 app app {rng.randrange(100, 99_999):>6} "
            f"{rng.choice(_NOUNS)}_{rng.choice(_ACTIONS)}_{rng.randrange(1000)}.py"
            for _ in range(rng.randint(6, 14))
        )

    def answer(self) -> str:
        """What an assistant answered."""
        return self.paragraph(self._rng.randint(3, 6))

    def person(self) -> str:
        """First and last name."""
        return f"{self._rng.choice(_FIRST_NAMES)} {self._rng.choice(_LAST_NAMES)}"

    def company(self) -> str:
        """A company's name."""
        return self._rng.choice(_COMPANIES)

    def _fill(self, template: str) -> str:
        choice = self._rng.choice
        return template.format(
            s=choice(_SUBJECTS), v=choice(_VERBS), o=choice(_OBJECTS), c=choice(_CIRCUMSTANCES)
        )
