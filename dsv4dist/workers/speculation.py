"""Speculative decoding on a rank: check the drafts of this step, propose those of the next.

A draft is right when it is the token that the model itself chooses at that position. Choosing is a function of logits,
seed and position alone (see sampler), so that outputs are the same with and without drafts, sampled ones included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dsv4dist.cache.pool import LayerCaches
from dsv4dist.config.model import ModelConfig
from dsv4dist.kernels.ops import Ops
from dsv4dist.model.draft import DraftLayer
from dsv4dist.step.builder import window_metadata
from dsv4dist.step.metadata import StepMetadata
from dsv4dist.workers.packet import RowKind


@dataclass(frozen=True)
class VerifyRows:
    """The rows of S sampled requests whose logits choose tokens: the last one, and one per draft before it.

    reqs   [S] request of this step
    rows   [S, 1 + k] row in the step of the j-th choice, its last row beyond a request's own
    valid  [S, 1 + k] whether the request has that choice
    """

    reqs: torch.Tensor
    rows: torch.Tensor
    valid: torch.Tensor


def verify_rows(reqs: torch.Tensor, sections: dict[str, torch.Tensor], k: int) -> VerifyRows:
    """The rows to choose from, for requests `reqs` [S] of the step; those that want no token have no valid row."""
    last_rows = (sections["query_start_loc"][1:][reqs].long() - 1).clamp_min(0).unsqueeze(1)
    num_drafts = sections["num_drafts"][reqs].long().unsqueeze(1)
    wanted = (sections["row_kind"][reqs] == RowKind.SAMPLE).unsqueeze(1)
    choice = torch.arange(k + 1, device=reqs.device)
    rows = (last_rows - num_drafts + choice).minimum(last_rows)
    return VerifyRows(reqs, rows, wanted & (choice <= num_drafts))


def count_right(chosen: torch.Tensor, verify: VerifyRows, token_ids: torch.Tensor) -> torch.Tensor:
    """How many leading drafts of each request are right, [S]: draft j is the token in the row after choice j.

    chosen     [S, 1 + k] the model's choices
    token_ids  [T] of the step
    """
    drafts = token_ids[verify.rows[:, 1:]]
    right = (drafts == chosen[:, :-1]) & verify.valid[:, 1:]
    return right.long().cumprod(dim=1).sum(dim=1)


def following_tokens(targets: torch.Tensor, chosen: torch.Tensor, verify: VerifyRows) -> torch.Tensor:
    """The token after every row, [T]: the one that the driver knows (`targets`), or the one chosen; 0 if neither."""
    spare = targets.shape[0]  # choices that are not valid land in a row of their own, behind the real ones
    extended = torch.cat((targets, targets.new_zeros(1)))
    extended[torch.where(verify.valid, verify.rows, spare)] = chosen
    return extended[:spare].clamp_min(0)


def propose(
    config: ModelConfig,
    ops: Ops,
    draft: DraftLayer,
    step: StepMetadata,
    streams: torch.Tensor,
    following: torch.Tensor,
    verify: VerifyRows,
    num_right: torch.Tensor,
    caches: LayerCaches,
    k: int,
) -> torch.Tensor:
    """The next k tokens that the draft layer expects after each request's newest token, [S, k].

        streams    [T, m, Hd] of the step's rows
        following  [T] the token after each row
        num_right  [S] drafts of each request in `verify` that were right; its newest token follows that choice's row
    Writes the draft layer's window rows of all rows of the step, and of the proposed positions; rows of drafts that
    turn out wrong are written again when their positions are computed.
    """
    newest = verify.rows.gather(1, num_right.unsqueeze(1)).squeeze(1)
    streams = draft.forward(streams, replace(step, token_ids=following), caches)[newest]
    token_to_req, positions = step.token_to_req[newest], step.positions[newest]
    wanted = verify.valid[:, 0]  # a padded request shares the row of a real one, whose window it must not write
    proposed = [draft.head(streams).argmax(dim=-1)]
    for ahead in range(1, k):
        position = torch.where(wanted, positions + ahead, -1)
        one = window_metadata(config, ops, step.window, token_to_req, position, proposed[-1])
        streams = draft.forward(streams, one, caches)
        proposed.append(draft.head(streams).argmax(dim=-1))
    return torch.stack(proposed, dim=1)
