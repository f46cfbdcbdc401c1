"""SageMaker training jobs, by boto3 alone: what is sent, what comes back, and what runs in the container."""
