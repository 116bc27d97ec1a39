"""Entry point of workflow_scripts/dj2mgm-1.dist-info, which lmms-eval loads while it is being imported."""

from lmms_eval.models.registry_v2 import ModelManifest

MANIFEST = ModelManifest("dj2mgm", simple_class_path="dj2mgm.features.lmms_eval.lmms_model.LmmsModel")
