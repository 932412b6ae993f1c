"""A program written for OpenAI is moved to the appliance by its base URL and key alone."""

import os
import subprocess
import sys
from pathlib import Path

from tests.sdk.python.appliance_facts import BASE_URL, KEY

PROGRAM = Path(__file__).with_name("migration_program.py")
QUESTIONS = {
    "How do I make a loaf?": "bread",
    "Which tower can I see in France?": "paris",
    "How do plants make their food?": "plants",
    "Who was first on the Moon?": "moon",
    "How may a bishop go?": "chess",
    "Where does the programming language's name come from?": "python",
}
MIGRATION = {"OPENAI_BASE_URL": BASE_URL, "OPENAI_API_KEY": KEY}
VENDORS = ("OPENAI_", "CO_", "COHERE_", "CROWDED_")


def test_it_finds_the_right_notes() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(VENDORS)}

    result = subprocess.run(
        [sys.executable, PROGRAM, *QUESTIONS],
        env={**environ, **MIGRATION},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == list(QUESTIONS.values())
