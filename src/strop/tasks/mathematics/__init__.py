"""Answers to problems of mathematics: `answers` finds one in a reply, `equivalence` compares two."""
