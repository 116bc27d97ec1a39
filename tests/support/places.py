"""Where the project is; importable by every test."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
