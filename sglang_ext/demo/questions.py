"""The document of the demo, what is asked about it, and what counts as a right answer."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

HEAD = (
    "Some special numbers and names are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about them afterwards.\n\n"
)
NEW_TOKENS = 16
"""Tokens generated for a question, always all of them, so that every run has the same steps."""

BATCH_TOKENS = 96
"""The same for the questions that are asked at once, so that the trace has enough decode steps to fit costs on."""


@dataclass(frozen=True)
class Question:
    """``opening`` begins the answer in the document's own words, ``expected`` goes on: a model this small copies well and infers badly."""

    text: str
    opening: str
    expected: str

    @property
    def prompt(self) -> str:
        """The whole input: document, question, beginning of the answer."""
        return f"{HEAD}{load_document()}\n\nQuestion: {self.text}\nAnswer: {self.opening}"

    def accepts(self, answer: str) -> bool:
        """The answer goes on with what the document says."""
        return answer.strip().casefold().startswith(self.expected.casefold())


# The model answers these with dense attention, so that a wrong answer would be the sparse attention's. Few, because stock torch_native
# recomputes the attention of the whole prefix for every question, cached or not.
QUESTIONS = (
    Question("What is the name of the master of the tender?", "The name of the master of the tender is", "Edvard Lindqvist"),
    Question("What is the name of the station cat?", "The name of the station cat is", "Bartholomew"),
    Question(
        "Where does the spare key of the tower door hang?",
        "The spare key of the tower door hangs behind",
        "the portrait of Captain Ilse Marrow",
    ),
    Question(
        "What is the special telephone number of the Stennick harbour office?",
        "The special telephone number of the Stennick harbour office is",
        "6129034",
    ),
)


def load_document() -> str:
    """The handbook of an invented lighthouse, about 5,500 tokens."""
    return files("sglang_ext.demo").joinpath("document.txt").read_text(encoding="utf-8")


def first_line(answer: str) -> str:
    """What is shown of an answer: the model goes on writing after it."""
    return answer.strip().partition("\n")[0].strip()
