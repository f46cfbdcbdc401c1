"""The site that tests of SageMaker share."""

from tests.launch.sagemaker.aws import site

__all__ = ["site"]
