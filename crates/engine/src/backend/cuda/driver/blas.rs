//! Matrix products of the vendor's library, run from plans that are kept.
//!
//! A plan is searched once for a shape and then only run, because the search takes
//! longer than most products.

use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::{result, sys};

use super::library::{Library, find};
use super::{Address, Context, DeviceMemory, DriverFault};

/// The shapes and types of a product: `output [rows, outputs] (+)= input [rows, inputs]
/// x weights [outputs, inputs]^T`, with input and weights in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct GemmShape {
    /// Rows of the input and the output.
    pub(crate) rows: u32,
    /// Elements of an output row.
    pub(crate) outputs: u32,
    /// Elements of an input row.
    pub(crate) inputs: u32,
    /// True if the output is f32; otherwise it is bf16.
    pub(crate) is_f32: bool,
    /// True if the product is added to the output's content.
    pub(crate) adds: bool,
}

/// The library's handle, and the workspace of its products.
pub(crate) struct Blas {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
}

// SAFETY: any thread may use the handle, one thread at a time; `Blas` is not Sync.
unsafe impl Send for Blas {}

/// The library's description of one product, and the algorithms that can run it.
pub(crate) struct GemmPlan {
    shape: GemmShape,
    description: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    input: sys::cublasLtMatrixLayout_t,
    output: sys::cublasLtMatrixLayout_t,
    /// At least one algorithm, in the library's own order, the fastest by its estimate
    /// first.
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    chosen: usize,
}

// SAFETY: descriptions are plain memory of the library.
unsafe impl Send for GemmPlan {}

impl Blas {
    /// Finds the library, in `folders` first, and starts it.
    ///
    /// # Errors
    /// A sentence about the missing library or symbol.
    pub(crate) fn start(context: &Arc<Context>, folders: &[PathBuf]) -> Result<Self, String> {
        find(Library::BlasLt, folders).map_err(|fault| fault.to_string())?;
        let workspace = context.allocate(WORKSPACE).map_err(|fault| fault.to_string())?;
        let handle = result::create_handle()
            .map_err(|error| format!("{} does not start: {error}", Library::BlasLt))?;
        Ok(Self { context: Arc::clone(context), handle, workspace })
    }

    /// Asks the library for algorithms that can run a product. The first one is chosen.
    ///
    /// # Errors
    /// [`DriverFault`] if the library has no algorithm for the shape.
    pub(crate) fn plan(&self, shape: GemmShape) -> Result<GemmPlan, DriverFault> {
        let GemmShape { rows, outputs, inputs, is_f32, adds: _ } = shape;
        let bf16 = sys::cudaDataType::CUDA_R_16BF;
        let kind = if is_f32 { sys::cudaDataType::CUDA_R_32F } else { bf16 };
        let (rows, outputs, inputs) = (u64::from(rows), u64::from(outputs), u64::from(inputs));
        let description = result::create_matmul_desc(
            // Sums are f32 even where input and output are bf16.
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType::CUDA_R_32F,
        )
        .map_err(|error| fault("cublasLtMatmulDescCreate", error))?;
        let mut plan = GemmPlan {
            shape,
            description,
            weights: std::ptr::null_mut(),
            input: std::ptr::null_mut(),
            output: std::ptr::null_mut(),
            algorithms: Vec::new(),
            chosen: 0,
        };
        // The library is column-major: its columns are our rows, so it must transpose
        // the weights.
        let transpose: i32 = 1; // CUBLAS_OP_T
        // SAFETY: the description lives, and the value has the attribute's type.
        unsafe {
            result::set_matmul_desc_attribute(
                plan.description,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                std::ptr::from_ref(&transpose).cast(),
                size_of_val(&transpose),
            )
        }
        .map_err(|error| fault("cublasLtMatmulDescSetAttribute", error))?;
        let layout = |kind, columns: u64, rows| {
            result::create_matrix_layout(kind, columns, rows, columns as i64)
                .map_err(|error| fault("cublasLtMatrixLayoutCreate", error))
        };
        plan.weights = layout(bf16, inputs, outputs)?;
        plan.input = layout(bf16, inputs, rows)?;
        plan.output = layout(kind, outputs, rows)?;
        plan.algorithms = self.ask(&plan)?;
        Ok(plan)
    }

    fn ask(&self, plan: &GemmPlan) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, DriverFault> {
        let preference = result::create_matmul_pref()
            .map_err(|error| fault("cublasLtMatmulPreferenceCreate", error))?;
        let most = self.workspace.bytes();
        // SAFETY: the structure consists of plain numbers, which the library
        // overwrites.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; MOST_WAYS] =
            unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: everything named here lives; the value has the attribute's type, and
        // there is room for as many results as are requested.
        let asked = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&most).cast(),
                size_of_val(&most),
            )
            .and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    plan.description,
                    plan.weights,
                    plan.input,
                    plan.output,
                    plan.output,
                    preference,
                    MOST_WAYS as i32,
                    found.as_mut_ptr(),
                    &mut count,
                )
                .result()
            })
        };
        // SAFETY: the preference was made above.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        asked.map_err(|error| fault("cublasLtMatmulAlgoGetHeuristic", error))?;
        let found = found.iter().take(count.max(0) as usize);
        let is_good = |way: &&sys::cublasLtMatmulHeuristicResult_t| way.state.result().is_ok();
        let algorithms: Vec<_> = found.filter(is_good).map(|way| way.algo).collect();
        match algorithms.is_empty() {
            false => Ok(algorithms),
            true => {
                let none = CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
                Err(fault("cublasLtMatmulAlgoGetHeuristic", none))
            }
        }
    }

    /// Queues a product in the stream.
    ///
    /// # Safety
    /// The three addresses must have room for the shapes of the plan.
    pub(crate) unsafe fn run(
        &self,
        plan: &GemmPlan,
        input: Address,
        weights: Address,
        output: Address,
    ) -> Result<(), DriverFault> {
        let one = 1.0_f32;
        // `beta` scales the output's old content: 1 adds to it, 0 overwrites it.
        let beta = if plan.shape.adds { 1.0_f32 } else { 0.0 };
        let place = |address: Address| address.0 as *mut c_void;
        // SAFETY: the caller vouches for the addresses; everything else lives.
        unsafe {
            result::matmul(
                self.handle,
                plan.description,
                std::ptr::from_ref(&one).cast(),
                std::ptr::from_ref(&beta).cast(),
                place(weights),
                plan.weights,
                place(input),
                plan.input,
                place(output),
                plan.output,
                place(output),
                plan.output,
                &plan.algorithms[plan.chosen],
                place(self.workspace.address()),
                self.workspace.bytes(),
                self.context.stream.cast(),
            )
        }
        .map_err(|error| fault(RUN, error))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: the handle was made once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl GemmPlan {
    /// Returns the number of algorithms that can run the product.
    pub(crate) fn ways(&self) -> usize {
        self.algorithms.len()
    }

    /// Chooses the algorithm that runs the product from now on.
    ///
    /// # Panics
    /// If `way` is not below [`Self::ways`].
    pub(crate) fn choose(&mut self, way: usize) {
        assert!(way < self.ways(), "one of the plan's ways");
        self.chosen = way;
    }

    /// Returns the plan with the next algorithm, or `None` after the last one.
    pub(crate) fn next(mut self) -> Option<Self> {
        self.chosen += 1;
        (self.chosen < self.ways()).then_some(self)
    }
}

impl Drop for GemmPlan {
    fn drop(&mut self) {
        // SAFETY: each layout was made once, or is null and skipped.
        unsafe {
            for layout in [self.weights, self.input, self.output] {
                if !layout.is_null() {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            let _ = result::destroy_matmul_desc(self.description);
        }
    }
}

fn fault(call: &'static str, error: CublasError) -> DriverFault {
    DriverFault { call, reason: error.to_string(), code: error.0 as u32 }
}

/// The name of the call that runs a product.
pub(super) const RUN: &str = "cublasLtMatmul";
/// The statuses that mean: this algorithm cannot run this product.
pub(super) const REFUSALS: [sys::cublasStatus_t; 3] = [
    sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE,
    sys::cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH,
    sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
];
/// The most algorithms that are requested for a product.
const MOST_WAYS: usize = 8;
/// Bytes of workspace, as the vendor advises for this generation.
const WORKSPACE: usize = 32 << 20;
