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

from .array import AlignToAnatomy, DilateAnatomy, SegmentCXRAnatomy
from .dictionary import (
    AlignToAnatomyD,
    AlignToAnatomyd,
    AlignToAnatomyDict,
    DilateAnatomyD,
    DilateAnatomyd,
    DilateAnatomyDict,
    SegmentCXRAnatomyD,
    SegmentCXRAnatomyd,
    SegmentCXRAnatomyDict,
)
from .fundus import (
    CanonicalizeFundus,
    CanonicalizeFundusD,
    CanonicalizeFundusd,
    CanonicalizeFundusDict,
    FieldOfView,
    eye_side,
    find_field_of_view,
    vessel_junctions,
)
from .parse import (
    DecodeCheXmask,
    ParseAnatomyd,
    ParseCXRAnatomyD,
    ParseCXRAnatomyd,
    ParseCXRAnatomyDict,
    ParsedAnatomy,
    check_cxr_anatomy,
    decode_rle,
)
from .parse_fundus import (
    ParseFundusAnatomy,
    ParseFundusAnatomyD,
    ParseFundusAnatomyd,
    ParseFundusAnatomyDict,
    field_frame,
)
