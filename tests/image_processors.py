"""The processors of transformers for the checkpoints of tests/images.py. Importing them takes two seconds."""

from typing import Any

from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from tests.images import (
    AREA,
    GEMMA4S,
    LFM2_SETTINGS,
    LONGEST_EDGE,
    MEAN,
    MERGES,
    PIXTRALS,
    POOLED,
    QWENS,
    SIDES,
    SOFT_TOKENS,
    STD,
    TOKENS,
    tokenizer_of,
)
from tests.torchvision_stand_in import torchvision_stand_in

with torchvision_stand_in():
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import Gemma4UnifiedImageProcessor
    from transformers.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedProcessor
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

processing_smolvlm.num2words = str  # its processor wants this package, which writes the times of videos in words


class _WithoutVideo:
    """Leaves out the processors for videos, which need torchvision, and for audio."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        if name in ("video_processor", "feature_extractor"):
            return None
        return super().check_argument_for_proper_class(name, argument)  # type: ignore[misc]


class _SmolVLM(_WithoutVideo, processing_smolvlm.SmolVLMProcessor):  # type: ignore[misc]
    apply_chat_template = ProcessorMixin.apply_chat_template  # its own reads settings of the processor for videos


class _Qwen2_5(_WithoutVideo, Qwen2_5_VLProcessor): ...  # type: ignore[misc]


class _Qwen3(_WithoutVideo, Qwen3VLProcessor): ...  # type: ignore[misc]


class _Gemma4(_WithoutVideo, Gemma4Processor): ...  # type: ignore[misc]


class _Gemma4Unified(_WithoutVideo, Gemma4UnifiedProcessor): ...  # type: ignore[misc]


def processor_of(kind: str, normalizes: bool = False) -> Any:
    """Returns the processor of transformers for the same tokenizer. normalizes: whether it normalizes pixels"""
    tokenizer = tokenizer_of(kind)
    template = tokenizer.chat_template
    how: dict[str, Any] = {"do_rescale": normalizes, "do_normalize": normalizes, "image_mean": MEAN, "image_std": STD}
    if kind in QWENS:
        images = Qwen2VLImageProcessorPil(
            size=AREA, patch_size=4, merge_size=2, temporal_patch_size=2 if normalizes else 1, **how
        )
        return (_Qwen2_5 if kind == "qwen2_5_vl" else _Qwen3)(images, tokenizer, None, chat_template=template)
    if kind in PIXTRALS:
        images = PixtralImageProcessorPil(size={"longest_edge": LONGEST_EDGE}, patch_size=4, **how)
        return PixtralProcessor(images, tokenizer, 4, MERGES[kind], template)
    if kind in GEMMA4S:
        unified = kind == "gemma4_unified"
        images = (Gemma4UnifiedImageProcessor if unified else Gemma4ImageProcessorPil)(
            patch_size=4, pooling_kernel_size=POOLED[kind], max_soft_tokens=SOFT_TOKENS, **how
        )
        return (_Gemma4Unified if unified else _Gemma4)(None, images, tokenizer, None, chat_template=template)
    if kind == "lfm2_vl":
        return Lfm2VlProcessor(Lfm2VlImageProcessor(**LFM2_SETTINGS, **how), tokenizer, template)
    side = SIDES[kind]
    if kind == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": side, "width": side}, do_pan_and_scan=False, **how)
        return Gemma3Processor(images, tokenizer, template, image_seq_length=TOKENS[kind])
    tiles = {"size": {"longest_edge": 3 * side}, "max_image_size": {"longest_edge": side}, **how}
    if kind == "smolvlm":
        return _SmolVLM(SmolVLMImageProcessorPil(**tiles), tokenizer, None, TOKENS[kind], template)
    return Idefics3Processor(Idefics3ImageProcessorPil(**tiles), tokenizer, TOKENS[kind], template)
