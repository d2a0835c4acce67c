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
"""The audit: which anatomy decided, and can it be trusted."""

from __future__ import annotations

from .attributions import (
    METHODS,
    SCOPES,
    GraphBatch,
    attribute_nodes,
    integrated_gradients,
    node_ranks,
    scope_embedding,
    shares,
)
from .faithfulness import available_methods, faithfulness_audit, load_graphs
from .pair_view import NodeView, PairView, view_pair
from .report import case_section, render_report, verdict
from .shortcut import cell_attribution, outside_anatomy, share_outside
from .stress import CONDITIONS, GRANULARITIES, build_variant, granularity_table, graph_variants, stress_table
