"""Replies judged by another model, which answers over HTTP.

`rubric` writes the judge's prompt, parses its answer and caches judgements; `client` calls it and limits the
calls. Prose, a refusal, a time-out or an error gives no score, never a 0.
"""
