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

from .datalist import (
    DatalistError,
    PatientOverlapError,
    check_patient_disjoint,
    load_datalist,
    load_section,
    save_datalist,
)
from .feature_store import FeatureStore, FeatureStoreError, feature_key
from .phantoms import generate_cxr_phantoms, generate_fundus_phantoms
from .protocol import QueryGallery, RetrievalMetadata, RetrievalProtocol, split_by_patient
from .sampler import PatientBatchSampler
