"""Fuzzers damage files; they do not need them to survive a power failure."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
