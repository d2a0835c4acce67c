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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GraphTransformer", "GraphTransformerLayer"]


class GraphTransformerLayer(nn.Module):
    """
    One pre-norm transformer layer whose attention is limited to a node's neighbours.

    Args:
        width: number of features per node D.
        heads: number of attention heads; must divide ``width``.
        mlp_ratio: hidden width of the feed-forward part over ``width``.
        dropout: probability, on the attention's and the feed-forward part's output.
        zero_init: start both residual branches at zero, so that the layer starts as the identity.

    Raises:
        ValueError: when ``heads`` does not divide ``width``.
    """

    def __init__(
        self, width: int, heads: int = 4, mlp_ratio: float = 2.0, dropout: float = 0.0, zero_init: bool = False
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}.")
        hidden = round(width * mlp_ratio)
        self.heads, self.zero_init = heads, zero_init
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, hidden)
        self.mlp_out = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.attention_norm.reset_parameters()
        self.mlp_norm.reset_parameters()
        for linear in (self.query_key_value, self.attention_out, self.mlp_in, self.mlp_out):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        if self.zero_init:
            nn.init.zeros_(self.attention_out.weight)
            nn.init.zeros_(self.mlp_out.weight)

    def forward(self, h: Tensor, attend: Tensor) -> Tensor:
        """
        Args:
            h: [B, N, D].
            attend: [B, 1, N, N] bool, True where row i may look at column j; every row has at least one True.

        Returns:
            [B, N, D].
        """
        batch, nodes, width = h.shape
        qkv = self.query_key_value(self.attention_norm(h))
        qkv = qkv.reshape(batch, nodes, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=attend)
        h = h + self.dropout(self.attention_out(mixed.transpose(1, 2).reshape(batch, nodes, width)))
        return h + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(h)))))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, zero_init={self.zero_init}"


class GraphTransformer(nn.Module):
    """
    Masked graph transformer over anatomy nodes (Graph-of-Differences, Sec. 2.2, Eq. 2).

    The input of the first layer is h_i + Emb(t_i) + MLP(c_i). Attention is masked to the adjacency and to valid nodes;
    a node always attends to itself. There is no last normalisation, so with ``zero_init`` the output starts as the
    input features, which is what a head set in closed form needs.

    Args:
        width: number of features per node D.
        num_node_types: number of node types.
        layers: number of layers L.
        heads: number of attention heads.
        mlp_ratio: hidden width of the feed-forward part over ``width``.
        dropout: probability.
        zero_init: start the type embedding, the position's MLP and all residual branches at zero.
    """

    def __init__(
        self,
        width: int,
        num_node_types: int,
        layers: int = 2,
        heads: int = 4,
        mlp_ratio: float = 2.0,
        dropout: float = 0.0,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        self.zero_init = zero_init
        self.type_embedding = nn.Embedding(num_node_types, width)
        self.position_in = nn.Linear(2, width)
        self.position_out = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            GraphTransformerLayer(width, heads, mlp_ratio, dropout, zero_init) for _ in range(layers)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.type_embedding.weight, std=0.02)
        for linear in (self.position_in, self.position_out):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        if self.zero_init:
            nn.init.zeros_(self.type_embedding.weight)
            nn.init.zeros_(self.position_out.weight)
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]

    def forward(self, h: Tensor, node_type: Tensor, pos: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
        """
        Args:
            h: [B, N, D] node features.
            node_type: [B, N] long; values of padded nodes are not read.
            pos: [B, N, 2], (x, y) in [0, 1].
            adjacency: [B, N, N] bool.
            mask: [B, N] bool, True for real nodes.

        Returns:
            contextualised node embeddings h' [B, N, D]; zero for padded nodes.
        """
        padded = (~mask).unsqueeze(-1)
        h = h + self.type_embedding(node_type.masked_fill(~mask, 0))
        h = h + self.position_out(F.gelu(self.position_in(pos.masked_fill(padded, 0.0))))
        h = h.masked_fill(padded, 0.0)
        itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        # the diagonal keeps every softmax non-empty, for padded nodes and for nodes without neighbours
        attend = (adjacency & mask.unsqueeze(1) & mask.unsqueeze(2)) | itself
        attend = attend.unsqueeze(1)
        for layer in self.layers:
            h = layer(h, attend)
        return h.masked_fill(padded, 0.0)

    def extra_repr(self) -> str:
        return f"zero_init={self.zero_init}"
