# SPDX-License-Identifier: Apache-2.0
"""Every name inside vLLM that the plugin leans on, and why: data for `find_missing`."""

import re
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """One name inside vLLM that must exist."""

    module: str
    """The module that holds the name, dotted: `vllm.v1.engine.core`."""

    name: str
    """The name within the module, dotted: a function, a class, `Class.method` or `Class.attribute`."""

    parameters: tuple[str, ...] = ()
    """Parameters that the function, or the class when called, must accept by name."""

    why: str
    """What it is needed for, as a phrase that goes on from "needed to": `build the model anew`."""

    @classmethod
    def of(cls, text: str, why: str) -> Self:
        """From `module:name` or `module:name(parameter, parameter)`."""
        found = re.fullmatch(r"([\w.]+):([\w.]+)(?:\((.+)\))?", text)
        assert found, text
        parameters = tuple(found[3].split(", ")) if found[3] else ()
        return cls(module=found[1], name=found[2], parameters=parameters, why=why)


_NEEDED: dict[str, tuple[str, ...]] = {
    "refuse requests while nobody knows what is served": (
        "vllm.v1.engine.core:EngineCore.add_request(request)",
        "vllm.v1.engine.core:EngineCoreProc._send_error_outputs_to_client(req_ids, client_index)",
        "vllm.v1.request:RequestStatus.FINISHED_ERROR",
    ),
    "finish the steps in flight before weights are exchanged": (
        "vllm.v1.engine.core:EngineCore.batch_queue",
        "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        "vllm.v1.engine.core:EngineCore.post_step(model_executed)",
    ),
    "send the outputs of the last steps of the old weights": (
        "vllm.v1.engine.core:EngineCoreProc.output_queue",
    ),
    "keep the prefix cache of different weights apart": (
        "vllm.v1.engine.core:EngineCore.request_block_hasher",
    ),
    "reach every worker": ("vllm.v1.engine.core:EngineCore.collective_rpc(method, args)",),
    "stage nothing into memory that is given back": ("vllm.v1.executor.abstract:Executor.sleep(level)",),
    "make anew what sleep has discarded": ("vllm.v1.executor.abstract:Executor.wake_up(tags)",),
    "know where DeepGEMM keeps its kernels on disk": ("vllm.utils.deep_gemm:_lazy_init",),
    "know whether the weights are asleep": ("vllm.v1.executor.abstract:Executor.sleeping_tags",),
    "name the life of an engine, and quicken its scheduler": (
        "vllm.v1.engine.core:EngineCore._initialize_effective_attention_block_size",
    ),
    "label each token with the weights that sampled it": (
        "vllm.v1.engine.core:EngineCore.set_weight_version(weight_version)",
    ),
    "dispatch our method by its name": ("vllm.v1.engine.core:EngineCoreProc._invoke_utility_method",),
    "call the engine core from the API server": (
        "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async(method)",
        "vllm.v1.engine.async_llm:AsyncLLM.engine_core",
    ),
    "call the engine core of an LLM": (
        "vllm.v1.engine.core_client:SyncMPClient._send_input(request_type, request)",
        "vllm.v1.engine.core_client:SyncMPClient.utility_results",
        "vllm.v1.engine.llm_engine:LLMEngine.engine_core",
    ),
    "put an LLM to sleep without waiting for a dead engine": (
        "vllm.v1.engine.llm_engine:LLMEngine.logger_manager",
        "vllm.v1.engine.llm_engine:LLMEngine.renderer",
    ),
    "stop scheduling at a step boundary": (
        "vllm.v1.core.sched.interface:PauseState.PAUSED_ALL",
        "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state(pause_state)",
    ),
    "recompute running requests after an update": (
        "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache(reset_running_requests)",
    ),
    "have prompts that meet a commit begin again": (
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request(request, timestamp, drop_stale_output)",
        "vllm.v1.core.sched.scheduler:Scheduler.prev_step_scheduled_req_ids",
        "vllm.v1.request:Request.num_computed_tokens",
        "vllm.v1.request:Request.num_output_tokens",
        "vllm.v1.request:Request.resumable",
        "vllm.v1.request:Request.prefill_stats",
        "vllm.v1.metrics.stats:PrefillStats.set("
        "num_prompt_tokens, num_local_cached_tokens, num_external_cached_tokens)",
    ),
    "say which weights computed the K and V of a request": (
        "vllm.v1.engine.core:EngineCore._attach_weight_version(outputs)",
        "vllm.v1.engine:EngineCoreOutputs.weight_version",
        "vllm.v1.engine.output_processor:RequestState.track_weight_version(weight_version)",
        "vllm.v1.engine.output_processor:RequestState.weight_version_starts",
    ),
    "hash waiting requests again": ("vllm.v1.core.sched.scheduler:Scheduler.requests",),
    "tell running requests from waiting ones": ("vllm.v1.core.sched.scheduler:Scheduler.running",),
    "end running requests at a commit": (
        "vllm.v1.engine.core:EngineCoreProc._send_abort_outputs(aborted_reqs)",
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests(request_ids, finished_status)",
    ),
    "let running requests finish before a commit": ("vllm.v1.core.sched.interface:PauseState.PAUSED_NEW",),
    "count the requests that hold K and V": ("vllm.v1.core.sched.scheduler:Scheduler.kv_holding_waiting",),
    "calibrate KV-cache scales with the tokens that were served last": (
        "vllm.v1.core.sched.scheduler:Scheduler._free_request(request)",
        "vllm.v1.request:Request.all_token_ids",
    ),
    "try new weights before they are served": (
        "vllm.model_executor.layers.attention:Attention.forward(query, key, value)",
        "vllm.model_executor.layers.attention:Attention.sliding_window",
        "vllm.model_executor.layers.attention:Attention.kv_sharing_target_layer_name",
    ),
    "know layers that are not plain attention": (
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "vllm.v1.attention.backend:AttentionType.DECODER",
    ),
    "refuse what can't be updated before anything is started": (
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "vllm.config.model:ModelConfig.use_mla",
    ),
    "answer calls that a dead engine left open": (
        "vllm.v1.engine.core_client:BackgroundResources.engine_dead",
    ),
    "end with a code of its own when the engine died": (
        "vllm.v1.engine.core_client:BackgroundResources.validate_alive(frames)",
    ),
    "end with the engine's exit code": ("vllm.v1.engine.core_client:BackgroundResources.engine_manager",),
    "tell an engine that was stopped from one that died": (
        "vllm.v1.engine.utils:CoreEngineProcManager.shutdown",
    ),
    "answer open requests when a server ends": (
        "vllm.v1.engine.async_llm:AsyncLLM.shutdown(timeout)",
        "vllm.v1.engine.output_processor:OutputProcessor.propagate_error(e)",
    ),
    "tell an engine that is frozen from one that is busy": (
        "vllm.v1.engine.core:EngineCoreProc.process_input_sockets",
        "vllm.v1.engine:UtilityOutput(call_id, result)",
        "vllm.v1.engine:UtilityResult",
        "vllm.v1.engine:EngineCoreOutputs(utility_output)",
    ),
    "end an engine with the process that owns it": ("vllm.v1.executor.abstract:Executor(vllm_config)",),
    "remove shared memory that a server left that was killed": (
        "vllm.distributed.device_communicators.shm_broadcast:ShmRingBuffer",
        "vllm.distributed.device_communicators.shm_object_storage:SingleWriterShmRingBuffer",
        "vllm.distributed.device_communicators.shm_tensor_arena:ShmTensorArena",
    ),
    "hash a request of an older epoch again when it looks for cached blocks": (
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks(request)",
    ),
    "answer for a request that holds a slot for its next token": (
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots(request, num_new_tokens, num_lookahead_tokens)",
    ),
    "answer for a request without a full block that is not cached": (
        "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks(request, num_computed_tokens)",
    ),
    "know whether requests keep all of their blocks": (
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
    ),
    "hash a request again": (
        "vllm.v1.request:Request.update_block_hashes",
        "vllm.v1.request:Request._block_hasher",
    ),
    "mix the epoch into a request's block hashes": ("vllm.v1.request:Request.cache_salt",),
    "give each worker its twin": ("vllm.v1.worker.worker_base:WorkerWrapperBase",),
    "build the twin beside the model": ("vllm.v1.worker.gpu_worker:Worker.load_model",),
    "compile the kernel for log-probabilities before the server is ready": (
        "vllm.v1.worker.gpu_worker:warmup_kernels(model_runner, worker_execute_model, worker_sample_tokens)",
        "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs(logits, token_ids)",
    ),
    "compile what masks logits before the server is ready": (
        "vllm.v1.sample.ops.topk_topp_sampler:register_top_k_top_p_warmups",
        "vllm.model_executor.warmup.jit_warmup:JitWarmupRegistry(vllm_config)",
        "vllm.model_executor.warmup.jit_warmup:JitWarmupRegistry.activate",
        "vllm.model_executor.warmup.jit_warmup:JitWarmupRegistry._registrations",
        "vllm.model_executor.warmup.jit_warmup:VllmJitKernel.get_warmup_keys",
        "vllm.model_executor.warmup.jit_warmup_triton_helper:TritonCompileKey(inputs)",
        "vllm.v1.worker.gpu_worker:Worker.use_v2_model_runner",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.is_last_pp_rank",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.is_pooling_model",
        "vllm.model_executor.warmup.jit_warmup:VllmJitKernel.compile_many(compile_keys)",
    ),
    "build the twin in the model's memory pool": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model",
    ),
    "account for the twin before the KV cache is sized": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.model_memory_usage",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.model_memory_usage",
    ),
    "learn which tensors an update must bring, and whether a checkpoint has one twice": (
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights(model_config, model)",
    ),
    "close other ways to load weights": (
        "vllm.model_executor.model_loader.utils:process_weights_after_loading(model)",
        "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload(model)",
        "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing(model)",
        "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
        "vllm.model_executor.model_loader.reload.inplace:get_parameter_for_reload(model)",
        "vllm.model_executor.model_loader.weight_utils:default_weight_loader(param)",
        "vllm.v1.worker.gpu_worker:Worker.reload_weights",
        "vllm.v1.worker.gpu_worker:Worker.init_weight_transfer_engine",
        "vllm.v1.worker.gpu_worker:Worker.start_weight_update",
        "vllm.v1.worker.gpu_worker:Worker.start_draft_weight_update",
        "vllm.v1.worker.gpu_worker:Worker.update_weights",
        "vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
    ),
    "read every worker's reply to a call that failed": (
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc(unique_reply_rank, non_block)",
    ),
    "know a model's other names": (
        "vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper",
        "vllm.model_executor.models.utils:WeightsMapper.map_name(key)",
        "vllm.model_executor.models.utils:WeightsMapper._map_name_with_shard(key)",
    ),
    "tie the twin's output layer as the served one's": (
        "vllm.model_executor.models.utils:_get_tied_embedding_params(module)",
        "vllm.config:ModelConfig.word_embeddings_untied_by_checkpoint",
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.tie_weights(layer, embed_tokens)",
        "vllm.distributed:get_tp_group",
    ),
    "build the twin": ("vllm.model_executor.model_loader.utils:initialize_model(vllm_config, model_config)",),
    "build the twin without compiling it": ("vllm.config:CompilationMode",),
    "keep the twin's layers out of the live forward context": (
        "vllm.config.compilation:CompilationConfig.static_forward_context",
    ),
    "read the settings": ("vllm.config:VllmConfig.additional_config",),
    "make --quantization accept blockfp8": (
        "vllm.model_executor.layers.quantization:register_quantization_config(quantization)",
    ),
    "choose the method of each layer": (
        "vllm.model_executor.layers.quantization.base_config:QuantizationConfig.get_quant_method(layer, prefix)",
    ),
    "take block-FP8 checkpoints": (
        "vllm.model_executor.layers.quantization.base_config:QuantizationConfig.override_quantization_method("
        "hf_quant_cfg, user_quant)",
    ),
    "quantize the experts of a layer as soon as they are loaded": (
        "vllm.model_executor.layers.quantization.online.moe_base:OnlineMoEMethodBase.create_weights("
        "layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype)",
    ),
    "leave experts to vLLM": (
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod(moe)",
    ),
    "know which experts this rank has": ("vllm.model_executor.layers.fused_moe:RoutedExperts.expert_map",),
    "tell experts from their padding": (
        "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig("
        "hidden_dim_unpadded, intermediate_size_per_partition_unpadded, swiglu_limit)",
    ),
    "keep routers as they are": ("vllm.model_executor.layers.fused_moe:GateLinear",),
    "run the experts of a second model": (
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._forward_impl("
        "hidden_states, router_logits, shared_experts_input, input_ids)",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._sequence_parallel_context",
    ),
    "run the experts of a second model that Transformers defines": (
        "vllm.model_executor.models.transformers.moe:TransformersMoERunner._forward_super(hidden_states, topk_weights)",
    ),
    "keep the experts of a second model out of the served one": (
        "vllm.config.compilation:CompilationConfig.static_all_moe_layers",
    ),
    "quantize each layer as soon as its last shard is loaded": (
        "vllm.model_executor.layers.quantization.online.fp8:OnlineLinearBase",
    ),
    "serve KV-cache scales": (
        "vllm.model_executor.layers.quantization.kv_cache:BaseKVCacheMethod(quant_config)",
    ),
    "change every copy of a KV-cache scale": (
        "vllm.model_executor.layers.attention.attention:set_default_quant_scales(layer, register_buffer)",
    ),
    "know which KV heads' scales are a rank's": ("vllm.config.model:ModelConfig.get_total_num_kv_heads",),
    "calibrate with what all ranks see": ("vllm.distributed:get_tp_group",),
    "know which layers are an encoder's": (
        "vllm.model_executor.models.interfaces:SupportsMultiModal._mark_tower_model("
        "vllm_config, modalities, targets)",
        "vllm.config.model:ModelConfig.is_multimodal_model",
        "vllm.config.model:ModelConfig.is_encoder_decoder",
    ),
    "know a layer's shape on one rank": (
        "vllm.model_executor.layers.linear:LinearBase(input_size, output_size)",
    ),
    "match ignored layers": (
        "vllm.model_executor.layers.quantization.compressed_tensors.utils:should_ignore_layer("
        "layer_name, ignore, fused_mapping, use_fnmatch)",
    ),
    "load block-FP8 checkpoints": (
        "vllm.model_executor.layers.quantization.utils.fp8_utils:create_fp8_weight_parameter",
        "vllm.model_executor.layers.quantization.utils.fp8_utils:create_fp8_scale_parameter",
        "vllm.model_executor.layers.quantization.utils.fp8_utils:validate_fp8_block_shape",
    ),
    "keep layers in the checkpoint's precision": (
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
    ),
    "keep embeddings in the checkpoint's precision": (
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
    ),
    "choose an FP8 GEMM kernel": (
        "vllm.model_executor.kernels.linear:is_supported_and_can_implement_kernel(kernel, config, compute_capability)",
    ),
    "multiply by FP8 weights on Hopper": (
        "vllm.model_executor.kernels.linear:DeepGemmFp8BlockScaledMMKernel",
        "vllm.utils.deep_gemm:fp8_gemm_nt",
    ),
    "multiply by FP8 weights without DeepGEMM": (
        "vllm.model_executor.kernels.linear:CutlassFp8BlockScaledMMKernel",
        "vllm._custom_ops:cutlass_scaled_mm(scale_a, scale_b, out_dtype)",
    ),
    "multiply by FP8 weights without DeepGEMM and CUTLASS": (
        "vllm.model_executor.kernels.linear:TritonFp8BlockScaledMMKernel",
        "vllm.model_executor.layers.quantization.utils.fp8_utils:w8a8_triton_block_scaled_mm",
    ),
    "compile that kernel before the server is ready": (
        "vllm.model_executor.layers.quantization.utils.fp8_utils:get_w8a8_block_fp8_configs(N, K, block_n, block_k)",
        "vllm.model_executor.layers.fused_moe.fused_moe:get_moe_configs(E, N, dtype, block_n, block_k)",
    ),
    "multiply by the experts of many tokens on Hopper": (
        "vllm.utils.deep_gemm:m_grouped_fp8_gemm_nt_contiguous",
    ),
    "lay the tokens of experts out as DeepGEMM wants them": (
        "vllm.utils.deep_gemm:get_mk_alignment_for_contiguous_layout",
    ),
    "cut vLLM's Triton kernel of experts as it was tuned": (
        "vllm.model_executor.layers.fused_moe.fused_moe:try_get_optimal_moe_config("
        "w1_shape, w2_shape, top_k, dtype, M, block_shape)",
    ),
    "multiply by the experts of tokens that are neither few nor many": (
        "vllm.model_executor.layers.fused_moe.fused_moe:invoke_fused_moe_triton_kernel("
        "mul_routed_weight, top_k, config, compute_type, use_fp8_w8a8, block_shape)",
    ),
    "compile DeepGEMM's kernels before the server is ready": (
        "vllm.model_executor.warmup.deep_gemm_warmup:_generate_optimal_warmup_m_values(max_tokens, n, device)",
    ),
    "join linear layers with norms in compiled graphs": (
        "vllm.compilation.passes.inductor_pass:InductorPass.hash_source",
        "vllm.ir.ops.layernorm:rms_norm(x, weight, epsilon, variance_size)",
        "vllm.ir.ops.layernorm:fused_add_rms_norm(x, x_residual, weight, epsilon, variance_size)",
        "vllm.config.compilation:CompilationConfig.inductor_compile_config",
    ),
    "say which weights sampled the tokens of beams": (
        "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search(prompt, request_id, params)",
        "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search(prompts, params)",
        "vllm.entrypoints.common.offline:OfflineInferenceMixin._render_and_run_requests(prompts, params, output_type)",
        "vllm.entrypoints.generate.beam_search.utils:BeamSearchSequence(orig_prompt, tokens, logprobs)",
    ),
    "show weight versions": (
        "vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch."
        "chat_completion_full_generator_batch(request, generators)",
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTokensChoice",
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTextChoice",
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTokensStreamChoice",
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTextStreamChoice",
        "vllm.v1.engine.output_processor:RequestState._weight_version_spans",
        "vllm.outputs:WeightVersionSpan(version, start, end)",
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.completion_stream_generator("
        "request, result_generator)",
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.request_output_to_completion_response("
        "final_res_batch)",
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator("
        "request, result_generator)",
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator("
        "result_generator)",
        "vllm.entrypoints.openai.completion.protocol:CompletionResponse",
        "vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice",
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse",
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponseChoice",
    ),
    "replay CUDA graphs in steps of more tokens": (
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager(vllm_config, cudagraph_mode, varlen_decode)",
        "vllm.config:CUDAGraphMode.mixed_mode",
        "vllm.engine.arg_utils:EngineArgs("
        "cudagraph_capture_sizes, max_cudagraph_capture_size, compilation_config, kv_cache_memory_bytes, "
        "num_gpu_blocks_override)",
    ),
    "replay one CUDA graph in steps with short prompts": (
        "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor(cg_mode, num_tokens, num_reqs, max_query_len)",
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.dispatch("
        "num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len)",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state(scheduler_output, dummy_run)",
        "vllm.v1.worker.gpu.model_runner:BatchReqState(num_scheduled_tokens, idx_mapping_np, has_prefill)",
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn("
        "input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, for_capture)",
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
    ),
    "prepare steps of the same requests by one launch": (
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs(scheduler_output, batch_req_state, batch_desc)",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn(input_batch)",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests(scheduler_output)",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run",
        "vllm.v1.worker.gpu.input_batch:InputBatch("
        "idx_mapping, idx_mapping_np, expanded_idx_mapping, num_reqs_after_padding, num_tokens_after_padding, "
        "seq_lens_cpu_upper_bound, num_computed_tokens_np)",
        "vllm.v1.worker.gpu.block_table:BlockTables(block_sizes, cp_size, slot_mapping_enabled)",
    ),
    "sample in CUDA graphs": (
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model(profile_only)",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample(hidden_states, input_batch, grammar_output)",
        "vllm.v1.worker.gpu.input_batch:InputBatch.make_dummy(num_reqs, num_tokens, input_buffers)",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.get_logprobs_dims(idx_mapping_np)",
        "vllm.v1.worker.gpu.sample.states:SamplingStates(max_num_reqs, vocab_size)",
        "vllm.v1.worker.gpu.sample.states:SamplingStates.add_request(req_idx, sampling_params)",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.add_request(req_idx, sampling_params)",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.needs_logits_processing",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.logits_processors",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.thinking_budget_state",
        "vllm.v1.worker.gpu.sample.output:SamplerOutput(sampled_token_ids, logprobs_tensors, num_sampled, num_rejected)",
        "vllm.compilation.cudagraph_pool:capture_pool(pool, vllm_config)",
        "vllm.distributed.parallel_state:graph_capture(device)",
        "vllm.utils.gc_utils:freeze_gc_for_cudagraph_capture",
    ),
    "send several tokens of a request in one message": (
        "vllm.v1.engine:EngineCoreOutputs(outputs, weight_version)",
        "vllm.v1.metrics.stats:IterationStats.update_from_output("
        "output, engine_core_timestamp, is_prefilling, req_stats)",
        "vllm.v1.outputs:LogprobsLists(logprob_token_ids, logprobs, sampled_token_ranks)",
        "vllm.sampling_params:RequestOutputKind.FINAL_ONLY",
    ),
    "keep logprobs in flat lists": (
        "vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request(tokenizer, request)",
        "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs(logprobs_lists)",
        "vllm.logprobs:FlatLogprobs.extend",
        "vllm.tokenizers.detokenizer_utils:convert_ids_list_to_tokens(tokenizer, token_ids)",
    ),
    "write answers fast": (
        "vllm.entrypoints.openai.completion.api_router:JSONResponse",
        "vllm.entrypoints.openai.chat_completion.api_router:JSONResponse",
        "vllm.entrypoints.scale_out.token_in_token_out.api_router:JSONResponse",
    ),
    "make answers of flat logprobs": (
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion._create_completion_logprobs("
        "token_ids, top_logprobs, num_output_top_logprobs, tokenizer, logprob_token_ids, initial_text_offset, "
        "return_as_token_id)",
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_logprobs("
        "token_ids, top_logprobs, tokenizer, num_output_top_logprobs, logprob_token_ids, return_as_token_id)",
        "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens._create_tokens_logprobs("
        "token_ids, top_logprobs, num_output_top_logprobs)",
    ),
    "decode by our own attention kernel": (
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward("
        "layer, query, key, value, kv_cache, attn_metadata, output)",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata("
        "num_actual_tokens, max_query_len, query_start_loc, seq_lens, block_table, slot_mapping, "
        "scheduler_metadata, max_seq_len, max_num_splits, causal)",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.build("
        "common_prefix_len, common_attn_metadata, fast_build)",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder._get_scheduler_metadata("
        "aot_schedule, batch_size, cu_query_lens, max_query_len, seqlens, max_seq_len, causal, max_num_splits)",
        "vllm.v1.attention.backend:CommonAttentionMetadata("
        "query_start_loc, query_start_loc_cpu, seq_lens, num_reqs, max_query_len, num_actual_tokens, "
        "seq_lens_cpu_upper_bound)",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.batch_invariant_enabled",
    ),
    "leave attention over chunks to vLLM": ("vllm.model_executor.layers.attention:ChunkedLocalAttention",),
    "have attention quantize its outputs": (
        "vllm.compilation.backends:VllmBackend.__call__(graph, example_inputs)",
        "vllm.model_executor.layers.attention.attention:unified_attention_with_output("
        "output, output_block_scale, kv_cache_dummy_dep)",
    ),
}
"""By what they are needed for: `module:name`, with the parameters that are given by name."""

INTERFACES: tuple[Interface, ...] = tuple(
    Interface.of(text, why) for why, names in _NEEDED.items() for text in names
)
