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
"""Writing figures."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from monai_god.files import written_aside

__all__ = ["save_figure"]


def save_figure(figure: Figure, path: str | os.PathLike[str], dpi: int = 100) -> Path:
    """Write a figure, without a display, so that the file is either the old or the new one, never half of it.

    Args:
        figure: made by ``matplotlib.figure.Figure(...)``; pyplot, which keeps every figure, is not needed.
        path: the file; its suffix names the format (png, pdf, svg). Its folder is created.
        dpi: dots per inch.

    Returns:
        the path.

    Raises:
        ValueError: a suffix that matplotlib cannot write.
    """
    target = Path(path)
    canvas = FigureCanvasAgg(figure)
    form = target.suffix.lower().lstrip(".")
    if form not in canvas.get_supported_filetypes():
        known = ", ".join(sorted(canvas.get_supported_filetypes()))
        raise ValueError(f"{target}: cannot write a figure as {form!r}; known formats are {known}.")
    with written_aside(target) as aside:
        figure.savefig(aside, format=form, dpi=dpi)
    return target
