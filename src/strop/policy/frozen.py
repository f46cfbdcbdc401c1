"""A model that takes part and never learns, or one rank's rows of it: the reference and the teacher."""

from __future__ import annotations

from collections.abc import Sequence

from strop.policy.digest import digest_each
from strop.policy.language_model import LanguageModel
from strop.policy.masters import Masters
from strop.policy.micro_batch import default_positions
from strop.policy.packing import PackedGroup
from strop.policy.ranks import Ranks, SingleRank
from strop.policy.scoring import score_share
from strop.rollout import FloatArray


class FrozenModel:
    """Weights that stay as they were loaded; nothing of a model given to it needs a gradient."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_positions: int | None = None,
        weights: Masters | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Take the whole model, or with `weights` and `ranks` this rank's rows of it."""
        self.model = model
        self._max_positions = max_positions or default_positions(model)
        self._weights = weights
        self._ranks = ranks or SingleRank()

    def score(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        """Return the log-probability (nats) of the scored tokens of each reply, in order of the groups.

        The groups are this rank's share, which may be empty. Every rank must call it.
        """
        found = score_share(self.model, groups, temperature, self._max_positions, self._ranks)
        self.release()
        return found

    def digest_tensors(self) -> dict[str, str]:
        """Return the digest of each tensor; on the first rank only. Every rank must call it."""
        tensors = self.model.named_parameters() if self._weights is None else self._weights.compute_copies()
        return digest_each(tensors, is_kept=self._ranks.index == 0)

    def release(self) -> None:
        """Drop what a forward gathered of other ranks' rows."""
        if self._weights is not None:
            self._weights.release()
