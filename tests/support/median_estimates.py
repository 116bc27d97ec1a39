"""Contrasts whose estimated variances are the medians of the estimates of true ones."""

from dataclasses import replace

import numpy as np
from scipy import stats

from dj2mgm.evaluation.contrasts import PairedContrast


def draw_median(contrast: PairedContrast) -> PairedContrast:
    """Return the contrast with the medians of the estimates of its true variances."""
    image_variance, seed_variance = (
        variance * stats.chi2.median(df) / df if np.isfinite(df) else variance
        for variance, df in ((contrast.image_variance, contrast.image_df), (contrast.seed_variance, contrast.seed_df))
    )
    return replace(contrast, image_variance=image_variance, seed_variance=seed_variance)
