# SPDX-License-Identifier: Apache-2.0
"""Every name inside vLLM that the plugin leans on, and why: data for `find_missing`."""

from dataclasses import dataclass


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


INTERFACES: tuple[Interface, ...] = (
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCore.add_request",
        parameters=("request",),
        why="refuse requests while nobody knows what is served",
    ),
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCore.batch_queue",
        why="finish the steps in flight before weights are exchanged",
    ),
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCore.step_with_batch_queue",
        why="finish the steps in flight before weights are exchanged",
    ),
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCore.post_step",
        parameters=("model_executed",),
        why="finish the steps in flight before weights are exchanged",
    ),
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCoreProc.output_queue",
        why="send the outputs of the last steps of the old weights",
    ),
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCore.request_block_hasher",
        why="keep the prefix cache of different weights apart",
    ),
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCore.collective_rpc",
        parameters=("method", "args"),
        why="reach every worker",
    ),
    Interface(
        module="vllm.v1.executor.abstract",
        name="Executor.sleep",
        parameters=("level",),
        why="stage nothing into memory that is given back",
    ),
    Interface(
        module="vllm.v1.executor.abstract",
        name="Executor.wake_up",
        parameters=("tags",),
        why="make anew what sleep has discarded",
    ),
    Interface(
        module="vllm.utils.deep_gemm",
        name="_lazy_init",
        why="know where DeepGEMM keeps its kernels on disk",
    ),
    Interface(
        module="vllm.v1.executor.abstract",
        name="Executor.sleeping_tags",
        why="know whether the weights are asleep",
    ),
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCore.set_weight_version",
        parameters=("weight_version",),
        why="label each token with the weights that sampled it",
    ),
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCoreProc._invoke_utility_method",
        why="dispatch our method by its name",
    ),
    Interface(
        module="vllm.v1.engine.core_client",
        name="AsyncMPClient.call_utility_async",
        parameters=("method",),
        why="call the engine core from the API server",
    ),
    Interface(
        module="vllm.v1.engine.core_client",
        name="SyncMPClient._send_input",
        parameters=("request_type", "request"),
        why="call the engine core of an LLM",
    ),
    Interface(
        module="vllm.v1.engine.core_client",
        name="SyncMPClient.utility_results",
        why="call the engine core of an LLM",
    ),
    Interface(
        module="vllm.v1.engine.llm_engine",
        name="LLMEngine.engine_core",
        why="call the engine core of an LLM",
    ),
    Interface(
        module="vllm.v1.engine.llm_engine",
        name="LLMEngine.logger_manager",
        why="put an LLM to sleep without waiting for a dead engine",
    ),
    Interface(
        module="vllm.v1.engine.llm_engine",
        name="LLMEngine.renderer",
        why="put an LLM to sleep without waiting for a dead engine",
    ),
    Interface(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM.engine_core",
        why="call the engine core from the API server",
    ),
    Interface(
        module="vllm.v1.core.sched.interface",
        name="PauseState.PAUSED_ALL",
        why="stop scheduling at a step boundary",
    ),
    Interface(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler.set_pause_state",
        parameters=("pause_state",),
        why="stop scheduling at a step boundary",
    ),
    Interface(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler.reset_prefix_cache",
        parameters=("reset_running_requests",),
        why="recompute running requests after an update",
    ),
    Interface(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler.requests",
        why="hash waiting requests again",
    ),
    Interface(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler.running",
        why="tell running requests from waiting ones",
    ),
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCoreProc._send_abort_outputs",
        parameters=("aborted_reqs",),
        why="end running requests at a commit",
    ),
    Interface(
        module="vllm.v1.engine.core",
        name="EngineCoreProc._send_error_outputs_to_client",
        parameters=("req_ids", "client_index"),
        why="refuse requests while nobody knows what is served",
    ),
    Interface(
        module="vllm.v1.core.sched.interface",
        name="PauseState.PAUSED_NEW",
        why="let running requests finish before a commit",
    ),
    Interface(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler.finish_requests",
        parameters=("request_ids", "finished_status"),
        why="end running requests at a commit",
    ),
    Interface(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler.kv_holding_waiting",
        why="count the requests that hold K and V",
    ),
    Interface(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler._free_request",
        parameters=("request",),
        why="calibrate KV-cache scales with the tokens that were served last",
    ),
    Interface(
        module="vllm.v1.request",
        name="Request.all_token_ids",
        why="calibrate KV-cache scales with the tokens that were served last",
    ),
    Interface(
        module="vllm.v1.request",
        name="RequestStatus.FINISHED_ERROR",
        why="refuse requests while nobody knows what is served",
    ),
    Interface(
        module="vllm.model_executor.layers.attention",
        name="Attention.forward",
        parameters=("query", "key", "value"),
        why="try new weights before they are served",
    ),
    Interface(
        module="vllm.model_executor.layers.attention",
        name="Attention.sliding_window",
        why="try new weights before they are served",
    ),
    Interface(
        module="vllm.model_executor.layers.attention",
        name="Attention.kv_sharing_target_layer_name",
        why="try new weights before they are served",
    ),
    Interface(
        module="vllm.model_executor.layers.attention_layer_base",
        name="AttentionLayerBase",
        why="know layers that are not plain attention",
    ),
    Interface(
        module="vllm.v1.attention.backend",
        name="AttentionType.DECODER",
        why="know layers that are not plain attention",
    ),
    Interface(
        module="vllm.engine.arg_utils",
        name="EngineArgs.create_engine_config",
        why="refuse what can't be updated before anything is started",
    ),
    Interface(
        module="vllm.config.model",
        name="ModelConfig.use_mla",
        why="refuse what can't be updated before anything is started",
    ),
    Interface(
        module="vllm.v1.engine.core_client",
        name="BackgroundResources.engine_dead",
        why="answer calls that a dead engine left open",
    ),
    Interface(
        module="vllm.v1.engine.core_client",
        name="BackgroundResources.validate_alive",
        parameters=("frames",),
        why="end with a code of its own when the engine died",
    ),
    Interface(
        module="vllm.v1.engine.core_client",
        name="BackgroundResources.engine_manager",
        why="end with the engine's exit code",
    ),
    Interface(
        module="vllm.v1.engine.utils",
        name="CoreEngineProcManager.shutdown",
        why="tell an engine that was stopped from one that died",
    ),
    Interface(
        module="vllm.v1.core.kv_cache_manager",
        name="KVCacheManager.get_computed_blocks",
        parameters=("request",),
        why="hash a request of an older epoch again when it looks for cached blocks",
    ),
    Interface(
        module="vllm.v1.core.kv_cache_manager",
        name="KVCacheManager.allocate_slots",
        parameters=("request", "num_new_tokens", "num_lookahead_tokens"),
        why="answer for a request that holds a slot for its next token",
    ),
    Interface(
        module="vllm.v1.core.kv_cache_manager",
        name="KVCacheManager.cache_blocks",
        parameters=("request", "num_computed_tokens"),
        why="answer for a request without a full block that is not cached",
    ),
    Interface(
        module="vllm.v1.core.single_type_kv_cache_manager",
        name="FullAttentionManager",
        why="know whether requests keep all of their blocks",
    ),
    Interface(
        module="vllm.v1.request",
        name="Request.update_block_hashes",
        why="hash a request again",
    ),
    Interface(
        module="vllm.v1.request",
        name="Request._block_hasher",
        why="hash a request again",
    ),
    Interface(
        module="vllm.v1.request",
        name="Request.cache_salt",
        why="mix the epoch into a request's block hashes",
    ),
    Interface(
        module="vllm.v1.worker.worker_base",
        name="WorkerWrapperBase",
        why="give each worker its twin",
    ),
    Interface(
        module="vllm.v1.worker.gpu_worker",
        name="Worker.load_model",
        why="build the twin beside the model",
    ),
    Interface(
        module="vllm.v1.worker.gpu_worker",
        name="warmup_kernels",
        parameters=("model_runner", "worker_execute_model", "worker_sample_tokens"),
        why="compile the kernel for log-probabilities before the server is ready",
    ),
    Interface(
        module="vllm.v1.sample.ops.topk_topp_sampler",
        name="register_top_k_top_p_warmups",
        parameters=(),
        why="compile what masks logits before the server is ready",
    ),
    Interface(
        module="vllm.model_executor.warmup.jit_warmup",
        name="JitWarmupRegistry",
        parameters=("vllm_config",),
        why="compile what masks logits before the server is ready",
    ),
    Interface(
        module="vllm.model_executor.warmup.jit_warmup",
        name="VllmJitKernel.compile_many",
        parameters=("compile_keys",),
        why="compile what masks logits before the server is ready",
    ),
    Interface(
        module="vllm.v1.worker.gpu.sample.logprob",
        name="compute_token_logprobs",
        parameters=("logits", "token_ids"),
        why="compile the kernel for log-probabilities before the server is ready",
    ),
    Interface(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner.load_model",
        why="build the twin in the model's memory pool",
    ),
    Interface(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner.model_memory_usage",
        why="account for the twin before the KV cache is sized",
    ),
    Interface(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner.model_memory_usage",
        why="account for the twin before the KV cache is sized",
    ),
    Interface(
        module="vllm.model_executor.model_loader.default_loader",
        name="DefaultModelLoader.get_all_weights",
        parameters=("model_config", "model"),
        why="learn which tensors an update must bring",
    ),
    Interface(
        module="vllm.model_executor.model_loader.utils",
        name="initialize_model",
        parameters=("vllm_config", "model_config"),
        why="build the twin",
    ),
    Interface(
        module="vllm.config",
        name="CompilationMode",
        why="build the twin without compiling it",
    ),
    Interface(
        module="vllm.config.compilation",
        name="CompilationConfig.static_forward_context",
        why="keep the twin's layers out of the live forward context",
    ),
    Interface(
        module="vllm.config",
        name="VllmConfig.additional_config",
        why="read the settings",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization",
        name="register_quantization_config",
        parameters=("quantization",),
        why="make --quantization accept blockfp8",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.base_config",
        name="QuantizationConfig.get_quant_method",
        parameters=("layer", "prefix"),
        why="choose the method of each layer",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.base_config",
        name="QuantizationConfig.override_quantization_method",
        parameters=("hf_quant_cfg", "user_quant"),
        why="take block-FP8 checkpoints",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.online.moe_base",
        name="OnlineMoEMethodBase.create_weights",
        parameters=("layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
        why="quantize the experts of a layer as soon as they are loaded",
    ),
    Interface(
        module="vllm.model_executor.layers.fused_moe",
        name="RoutedExperts.expert_map",
        why="know which experts this rank has",
    ),
    Interface(
        module="vllm.model_executor.layers.fused_moe.config",
        name="FusedMoEConfig",
        parameters=("hidden_dim_unpadded", "intermediate_size_per_partition_unpadded", "swiglu_limit"),
        why="tell experts from their padding",
    ),
    Interface(
        module="vllm.model_executor.layers.fused_moe",
        name="GateLinear",
        why="keep routers as they are",
    ),
    Interface(
        module="vllm.model_executor.layers.fused_moe.runner.moe_runner",
        name="MoERunner._forward_impl",
        parameters=("hidden_states", "router_logits", "shared_experts_input", "input_ids"),
        why="run the experts of a second model",
    ),
    Interface(
        module="vllm.model_executor.layers.fused_moe.runner.moe_runner",
        name="MoERunner._sequence_parallel_context",
        why="run the experts of a second model",
    ),
    Interface(
        module="vllm.model_executor.models.transformers.moe",
        name="TransformersMoERunner._forward_super",
        parameters=("hidden_states", "topk_weights"),
        why="run the experts of a second model that Transformers defines",
    ),
    Interface(
        module="vllm.config.compilation",
        name="CompilationConfig.static_all_moe_layers",
        why="keep the experts of a second model out of the served one",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.online.fp8",
        name="OnlineLinearBase",
        why="quantize each layer as soon as its last shard is loaded",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.kv_cache",
        name="BaseKVCacheMethod",
        parameters=("quant_config",),
        why="serve KV-cache scales",
    ),
    Interface(
        module="vllm.model_executor.layers.attention.attention",
        name="set_default_quant_scales",
        parameters=("layer", "register_buffer"),
        why="change every copy of a KV-cache scale",
    ),
    Interface(
        module="vllm.config.model",
        name="ModelConfig.get_total_num_kv_heads",
        why="know which KV heads' scales are a rank's",
    ),
    Interface(
        module="vllm.distributed",
        name="get_tp_group",
        why="calibrate with what all ranks see",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.compressed_tensors.utils",
        name="should_ignore_layer",
        parameters=("layer_name", "ignore", "fused_mapping", "use_fnmatch"),
        why="match ignored layers",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.utils.fp8_utils",
        name="create_fp8_weight_parameter",
        why="load block-FP8 checkpoints",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.utils.fp8_utils",
        name="create_fp8_scale_parameter",
        why="load block-FP8 checkpoints",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.utils.fp8_utils",
        name="validate_fp8_block_shape",
        why="load block-FP8 checkpoints",
    ),
    Interface(
        module="vllm.model_executor.layers.linear",
        name="UnquantizedLinearMethod",
        why="keep layers in the checkpoint's precision",
    ),
    Interface(
        module="vllm.model_executor.layers.vocab_parallel_embedding",
        name="UnquantizedEmbeddingMethod",
        why="keep embeddings in the checkpoint's precision",
    ),
    Interface(
        module="vllm.model_executor.kernels.linear",
        name="is_supported_and_can_implement_kernel",
        parameters=("kernel", "config", "compute_capability"),
        why="choose an FP8 GEMM kernel",
    ),
    Interface(
        module="vllm.model_executor.kernels.linear",
        name="DeepGemmFp8BlockScaledMMKernel",
        why="multiply by FP8 weights on Hopper",
    ),
    Interface(
        module="vllm.model_executor.kernels.linear",
        name="CutlassFp8BlockScaledMMKernel",
        why="multiply by FP8 weights without DeepGEMM",
    ),
    Interface(
        module="vllm.model_executor.kernels.linear",
        name="TritonFp8BlockScaledMMKernel",
        why="multiply by FP8 weights without DeepGEMM and CUTLASS",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.utils.fp8_utils",
        name="get_w8a8_block_fp8_configs",
        parameters=("N", "K", "block_n", "block_k"),
        why="compile that kernel before the server is ready",
    ),
    Interface(
        module="vllm.utils.deep_gemm",
        name="fp8_gemm_nt",
        why="multiply by FP8 weights on Hopper",
    ),
    Interface(
        module="vllm.utils.deep_gemm",
        name="m_grouped_fp8_gemm_nt_contiguous",
        why="multiply by the experts of many tokens on Hopper",
    ),
    Interface(
        module="vllm.utils.deep_gemm",
        name="get_mk_alignment_for_contiguous_layout",
        why="lay the tokens of experts out as DeepGEMM wants them",
    ),
    Interface(
        module="vllm.model_executor.layers.fused_moe.fused_moe",
        name="try_get_optimal_moe_config",
        parameters=("w1_shape", "w2_shape", "top_k", "dtype", "M", "block_shape"),
        why="cut vLLM's Triton kernel of experts as it was tuned",
    ),
    Interface(
        module="vllm.model_executor.layers.fused_moe.fused_moe",
        name="get_moe_configs",
        parameters=("E", "N", "dtype", "block_n", "block_k"),
        why="compile that kernel before the server is ready",
    ),
    Interface(
        module="vllm.model_executor.layers.fused_moe.fused_moe",
        name="invoke_fused_moe_triton_kernel",
        parameters=("mul_routed_weight", "top_k", "config", "compute_type", "use_fp8_w8a8", "block_shape"),
        why="multiply by the experts of tokens that are neither few nor many",
    ),
    Interface(
        module="vllm._custom_ops",
        name="cutlass_scaled_mm",
        parameters=("scale_a", "scale_b", "out_dtype"),
        why="multiply by FP8 weights without DeepGEMM",
    ),
    Interface(
        module="vllm.model_executor.layers.quantization.utils.fp8_utils",
        name="w8a8_triton_block_scaled_mm",
        why="multiply by FP8 weights without DeepGEMM and CUTLASS",
    ),
    Interface(
        module="vllm.model_executor.warmup.deep_gemm_warmup",
        name="_generate_optimal_warmup_m_values",
        parameters=("max_tokens", "n", "device"),
        why="compile DeepGEMM's kernels before the server is ready",
    ),
    Interface(
        module="vllm.compilation.passes.inductor_pass",
        name="InductorPass.hash_source",
        why="join linear layers with norms in compiled graphs",
    ),
    Interface(
        module="vllm.ir.ops.layernorm",
        name="rms_norm",
        parameters=("x", "weight", "epsilon", "variance_size"),
        why="join linear layers with norms in compiled graphs",
    ),
    Interface(
        module="vllm.ir.ops.layernorm",
        name="fused_add_rms_norm",
        parameters=("x", "x_residual", "weight", "epsilon", "variance_size"),
        why="join linear layers with norms in compiled graphs",
    ),
    Interface(
        module="vllm.config.compilation",
        name="CompilationConfig.inductor_compile_config",
        why="join linear layers with norms in compiled graphs",
    ),
    Interface(
        module="vllm.v1.engine.output_processor",
        name="RequestState._weight_version_spans",
        why="show weight versions",
    ),
    Interface(
        module="vllm.outputs",
        name="WeightVersionSpan",
        parameters=("version", "start", "end"),
        why="show weight versions",
    ),
    Interface(
        module="vllm.entrypoints.openai.completion.serving",
        name="OpenAIServingCompletion.completion_stream_generator",
        parameters=("request", "result_generator"),
        why="show weight versions",
    ),
    Interface(
        module="vllm.entrypoints.openai.completion.serving",
        name="OpenAIServingCompletion.request_output_to_completion_response",
        parameters=("final_res_batch",),
        why="show weight versions",
    ),
    Interface(
        module="vllm.entrypoints.openai.chat_completion.serving",
        name="OpenAIServingChat.chat_completion_stream_generator",
        parameters=("request", "result_generator"),
        why="show weight versions",
    ),
    Interface(
        module="vllm.entrypoints.openai.chat_completion.serving",
        name="OpenAIServingChat.chat_completion_full_generator",
        parameters=("result_generator",),
        why="show weight versions",
    ),
    *(
        Interface(module=f"vllm.entrypoints.openai.{module}.protocol", name=name, why="show weight versions")
        for module, name in (
            ("completion", "CompletionResponse"),
            ("completion", "CompletionResponseChoice"),
            ("chat_completion", "ChatCompletionResponse"),
            ("chat_completion", "ChatCompletionResponseChoice"),
        )
    ),
    Interface(
        module="vllm.v1.worker.gpu.cudagraph_utils",
        name="CudaGraphManager._init_candidates",
        why="replay CUDA graphs in steps of more tokens",
    ),
    Interface(
        module="vllm.v1.worker.gpu.cudagraph_utils",
        name="ModelCudaGraphManager",
        parameters=("vllm_config", "cudagraph_mode", "varlen_decode"),
        why="replay CUDA graphs in steps of more tokens",
    ),
    Interface(
        module="vllm.v1.worker.gpu.cudagraph_utils",
        name="BatchExecutionDescriptor",
        parameters=("cg_mode", "num_tokens", "num_reqs", "max_query_len"),
        why="replay one CUDA graph in steps with short prompts",
    ),
    Interface(
        module="vllm.v1.worker.gpu.cudagraph_utils",
        name="ModelCudaGraphManager.dispatch",
        parameters=("num_reqs", "num_tokens", "uniform_token_count", "num_active_loras", "max_query_len"),
        why="replay one CUDA graph in steps with short prompts",
    ),
    Interface(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner.gather_batch_req_state",
        parameters=("scheduler_output", "dummy_run"),
        why="replay one CUDA graph in steps with short prompts",
    ),
    Interface(
        module="vllm.v1.worker.gpu.model_runner",
        name="BatchReqState",
        parameters=("num_scheduled_tokens", "idx_mapping_np", "has_prefill"),
        why="replay one CUDA graph in steps with short prompts",
    ),
    Interface(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner.prepare_inputs",
        parameters=("scheduler_output", "batch_req_state", "batch_desc"),
        why="prepare steps of the same requests by one launch",
    ),
    Interface(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner.prepare_attn",
        parameters=("input_batch",),
        why="prepare steps of the same requests by one launch",
    ),
    Interface(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner.add_requests",
        parameters=("scheduler_output",),
        why="prepare steps of the same requests by one launch",
    ),
    Interface(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner._dummy_run",
        why="prepare steps of the same requests by one launch",
    ),
    Interface(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner.capture_model",
        parameters=("profile_only",),
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner.sample",
        parameters=("hidden_states", "input_batch", "grammar_output"),
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.v1.worker.gpu.input_batch",
        name="InputBatch",
        parameters=(
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "num_reqs_after_padding",
            "num_tokens_after_padding",
            "seq_lens_cpu_upper_bound",
            "num_computed_tokens_np",
        ),
        why="prepare steps of the same requests by one launch",
    ),
    Interface(
        module="vllm.v1.worker.gpu.input_batch",
        name="InputBatch.make_dummy",
        parameters=("num_reqs", "num_tokens", "input_buffers"),
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.v1.worker.gpu.block_table",
        name="BlockTables",
        parameters=("block_sizes", "cp_size", "slot_mapping_enabled"),
        why="prepare steps of the same requests by one launch",
    ),
    Interface(
        module="vllm.v1.worker.gpu.sample.sampler",
        name="Sampler.get_logprobs_dims",
        parameters=("idx_mapping_np",),
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.v1.worker.gpu.sample.states",
        name="SamplingStates",
        parameters=("max_num_reqs", "vocab_size"),
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.v1.worker.gpu.sample.states",
        name="SamplingStates.add_request",
        parameters=("req_idx", "sampling_params"),
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.v1.worker.gpu.sample.sampler",
        name="Sampler.add_request",
        parameters=("req_idx", "sampling_params"),
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.v1.worker.gpu.sample.output",
        name="SamplerOutput",
        parameters=("sampled_token_ids", "logprobs_tensors", "num_sampled", "num_rejected"),
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.compilation.cudagraph_pool",
        name="capture_pool",
        parameters=("pool", "vllm_config"),
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.distributed.parallel_state",
        name="graph_capture",
        parameters=("device",),
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.utils.gc_utils",
        name="freeze_gc_for_cudagraph_capture",
        why="sample in CUDA graphs",
    ),
    Interface(
        module="vllm.v1.worker.gpu.model_states.default",
        name="DefaultModelState.prepare_attn",
        parameters=(
            *(
                "input_batch",
                "cudagraph_mode",
                "block_tables",
                "slot_mappings",
                "attn_groups",
                "kv_cache_config",
            ),
            "for_capture",
        ),
        why="replay one CUDA graph in steps with short prompts",
    ),
    Interface(
        module="vllm.model_executor.layers.attention_layer_base",
        name="AttentionLayerBase",
        why="replay one CUDA graph in steps with short prompts",
    ),
    Interface(
        module="vllm.config",
        name="CUDAGraphMode.mixed_mode",
        why="replay CUDA graphs in steps of more tokens",
    ),
    Interface(
        module="vllm.engine.arg_utils",
        name="EngineArgs",
        parameters=(
            *("cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config"),
            *("kv_cache_memory_bytes", "num_gpu_blocks_override"),
        ),
        why="replay CUDA graphs in steps of more tokens",
    ),
    Interface(
        module="vllm.v1.attention.backends.flash_attn",
        name="FlashAttentionImpl.forward",
        parameters=("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        why="decode by our own attention kernel",
    ),
    Interface(
        module="vllm.model_executor.layers.attention",
        name="ChunkedLocalAttention",
        why="leave attention over chunks to vLLM",
    ),
    Interface(
        module="vllm.v1.attention.backends.flash_attn",
        name="FlashAttentionMetadata",
        parameters=(
            "num_actual_tokens",
            "max_query_len",
            "query_start_loc",
            "seq_lens",
            "block_table",
            "slot_mapping",
            "scheduler_metadata",
            "max_seq_len",
            "max_num_splits",
            "causal",
        ),
        why="decode by our own attention kernel",
    ),
    Interface(
        module="vllm.v1.attention.backends.flash_attn",
        name="FlashAttentionMetadataBuilder.build",
        parameters=("common_prefix_len", "common_attn_metadata", "fast_build"),
        why="decode by our own attention kernel",
    ),
    Interface(
        module="vllm.v1.attention.backends.flash_attn",
        name="FlashAttentionMetadataBuilder._get_scheduler_metadata",
        parameters=(
            *("aot_schedule", "batch_size", "cu_query_lens", "max_query_len"),
            *("seqlens", "max_seq_len", "causal", "max_num_splits"),
        ),
        why="decode by our own attention kernel",
    ),
    Interface(
        module="vllm.v1.attention.backend",
        name="CommonAttentionMetadata",
        parameters=(
            *("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "max_query_len"),
            *("num_actual_tokens", "seq_lens_cpu_upper_bound"),
        ),
        why="decode by our own attention kernel",
    ),
    Interface(
        module="vllm.v1.attention.backends.flash_attn",
        name="FlashAttentionImpl.batch_invariant_enabled",
        why="decode by our own attention kernel",
    ),
    Interface(
        module="vllm.compilation.backends",
        name="VllmBackend.__call__",
        parameters=("graph", "example_inputs"),
        why="have attention quantize its outputs",
    ),
    Interface(
        module="vllm.model_executor.layers.attention.attention",
        name="unified_attention_with_output",
        parameters=("output", "output_block_scale", "kv_cache_dummy_dep"),
        why="have attention quantize its outputs",
    ),
)
