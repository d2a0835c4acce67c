# Copyright (c) monai_god contributors
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#     http://www.apache.org/licenses/LICENSE-2.0
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
from __future__ import annotations

import math

import pytest
import torch

from monai_god.losses import CosineIdentityLoss


@pytest.mark.parametrize("margin_type, margin", [("none", 0.0), ("cosface", 0.2), ("arcface", 0.3)])
def test_equals_a_loop(margin_type, margin):
    z, labels = torch.randn(6, 5), torch.tensor([0, 3, 1, 1, 2, 0])
    loss = CosineIdentityLoss(5, 4, margin=margin, margin_type=margin_type)
    total = 0.0
    for b in range(6):
        logits = []
        for c in range(4):
            cosine = torch.cosine_similarity(z[b], loss.weight[c], dim=0).item()
            if c == labels[b] and margin_type == "cosface":
                cosine -= margin
            if c == labels[b] and margin_type == "arcface":
                angle = math.acos(cosine)
                past = angle + margin >= math.pi
                cosine = cosine - margin * math.sin(margin) if past else math.cos(angle + margin)
            logits.append(30 * cosine)
        top = max(logits)
        log_sum = top + math.log(sum(math.exp(x - top) for x in logits))
        for c in range(4):
            target = 0.1 / 4 + (0.9 if c == labels[b] else 0.0)
            total -= target * (logits[c] - log_sum) / 6
    assert loss(z, labels).item() == pytest.approx(total, rel=1e-4)


def test_arcface_is_monotonous_past_pi():
    loss = CosineIdentityLoss(2, 2, margin=0.5, margin_type="arcface", label_smoothing=0.0)
    with torch.no_grad():
        loss.weight.copy_(torch.eye(2))
    angles = torch.linspace(0, math.pi, 50)
    values = [loss(torch.stack([a.cos(), 0 * a])[None], torch.tensor([0])).item() for a in angles]
    # the other class stays at cosine 0, so the loss follows the true class's logit
    assert torch.isfinite(torch.tensor(values)).all()
    z = torch.stack([angles.cos(), angles.sin()], 1)
    true = []
    for row in z:
        cosine = row[0].item()
        past = cosine <= -math.cos(0.5)
        true.append(cosine - 0.5 * math.sin(0.5) if past else math.cos(math.acos(cosine) + 0.5))
    assert all(a >= b - 1e-6 for a, b in zip(true, true[1:], strict=False))


def test_starts_at_the_class_means():
    z = torch.nn.functional.normalize(torch.randn(6, 5), dim=1)
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    loss = CosineIdentityLoss(5, 4)
    untouched = loss.weight[3].clone()
    loss.initialise_from_embeddings(z, labels)
    for c in range(3):
        mean = z[labels == c].mean(0)
        torch.testing.assert_close(loss.weight[c], mean / mean.norm())
    assert torch.equal(loss.weight[3], untouched)


def test_rejects_unknown_margin():
    with pytest.raises(ValueError, match="margin_type"):
        CosineIdentityLoss(4, 3, margin_type="sphere")
