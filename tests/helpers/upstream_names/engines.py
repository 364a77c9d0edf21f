"""The vLLM engines, and how weights reach them."""

from helpers.upstream_names.seam import Seam

SEAMS: tuple[Seam, ...] = (
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor",
        how="subclassed",
        ours="lmm_r1.generation.engine_actor:KitRolloutActor",
        reason="a prompt and its images are encoded once per group, and rewards are never lost",
        signature="self args bundle_indices agent_func_path remote_rm_url mm_pad_token_ids kwargs",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor._configure_device_env",
        how="used",
        ours="lmm_r1.generation.engine_actor:KitRolloutActor",
        reason="an engine in the actor's own process starts from the same environment as upstream's",
        signature="self backend bundle_indices num_gpus",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor._configure_vllm_env",
        how="used",
        ours="lmm_r1.generation.engine_actor:KitRolloutActor",
        reason="as above",
        signature="self version vllm full_determinism",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor.get_num_unfinished_requests",
        how="used",
        ours="lmm_r1.rl.generator:KitSamplesGenerator.generate",
        reason="the next group goes to the engine with the least to do",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor.pause_generation",
        how="subclassed",
        ours="lmm_r1.generation.engine_actor:KitRolloutActor.pause_generation",
        reason="an engine in the actor's own process is held up too, and no request on its way loses its processed images",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor.resume_generation",
        how="subclassed",
        ours="lmm_r1.generation.engine_actor:KitRolloutActor.resume_generation",
        reason="as above",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:batch_vllm_engine_call",
        how="used",
        ours="lmm_r1.rl.model_groups:wake",
        reason="engines that share GPUs with the models sleep while those train",
        signature="engines method_name args rank_0_only kwargs",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor.wake_up",
        how="used",
        ours="lmm_r1.rl.model_groups:wake",
        reason="wakes the weights, then the cache, so that engines woken for new weights may be woken again",
        signature="self tags",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor.sleep",
        how="subclassed",
        ours="lmm_r1.generation.engine_actor:KitRolloutActor.sleep",
        reason="engines sleep before models come to their GPUs, and requests that are held up then are not aborted",
        signature="self level",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap",
        how="subclassed",
        ours="lmm_r1.generation.worker_extension:BucketWeights",
        reason="weights come in buckets, not one a call",
        signature="self args kwargs",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap.init_process_group",
        how="used",
        ours="lmm_r1.generation.worker_extension:BucketWeights.receive_bucket",
        reason="the group through which the trainer broadcasts",
        signature="self master_address master_port rank_offset world_size group_name backend use_ray",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.utils:get_physical_gpu_id",
        how="used",
        ours="lmm_r1.generation.worker_extension:BucketWeights.open_bucket",
        reason="which GPU a worker is on, whatever its number there",
        signature="",
    ),
)
