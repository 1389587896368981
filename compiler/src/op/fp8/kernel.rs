//! Tiles rounded to e4m3.

use crate::CompileError;
use crate::codegen::naive::{Naive, numbers};
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::{DType, TILE};
use crate::op::kernel::{KernelKind, Slot, Work, input, ints, need, result, times, wide};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Numbers of each tile rounded to e4m3 in units of its scale, a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8 {
    /// Matrices.
    pub matrices: u64,
    /// Rows of each.
    pub rows: u64,
    /// Columns of each.
    pub columns: u64,
    /// Rows and columns of a tile, at most.
    pub tile: [u64; 2],
    /// How many groups of rows begin tiles anew, where there are some.
    pub groups: Option<u64>,
    /// Whether the result is stored in e4m3, else in bf16.
    pub e4m3: bool,
    /// Whether the result has the columns of `x` as its rows.
    pub turned: bool,
}

impl Fp8 {
    /// Tiles below one another in a matrix, at most.
    pub fn tiles_down(&self) -> u64 {
        let high = self.tile[0].max(1);
        match self.groups {
            None => self.rows.div_ceil(high),
            // Each group has one that is not full, and so have the rows of none.
            Some(groups) => (self.rows / high).saturating_add(groups.saturating_add(1).min(self.rows)),
        }
    }

    /// Lines of a result in e4m3, and numbers of each.
    pub fn lines(&self) -> [u64; 2] {
        if self.turned { [self.columns, self.rows] } else { [self.rows, self.columns] }
    }

    /// Tiles of a row of them.
    pub fn tiles_across(&self) -> u64 {
        self.columns.div_ceil(self.tile[1].max(1))
    }
}

impl KernelKind for Fp8 {
    fn signature(&self) -> Vec<Slot> {
        let &Fp8 { matrices, rows, columns, groups, .. } = self;
        let shape = [times(&[matrices, rows]), columns];
        let offsets = groups.map(|groups| ints("offsets", &[groups.saturating_add(1)]));
        let x = input("x", &shape).float(0);
        let y = match self.e4m3 {
            false => result("y", &shape).stored(DType::Bf16),
            true => result("y", &self.lines()).stored(DType::E4m3),
        };
        [x].into_iter().chain(offsets).chain([y]).collect()
    }

    fn check(&self) -> Result<(), String> {
        need(self.tile.iter().all(|&n| n > 0), "a tile has at least one row and one column")?;
        need(self.groups.is_none() || self.matrices == 1, "groups are of one matrix")?;
        need(self.e4m3 || !self.turned, "what is turned is stored in e4m3")?;
        let [lines, depth] = self.lines();
        let along = self.tile[usize::from(!self.turned)];
        let matrix = self.groups.is_none() && self.matrices == 1 && along == TILE;
        need(
            !self.e4m3 || matrix && super::Fp8::fits(lines, depth),
            "in e4m3 a matrix has 16 lines or a multiple, of whole tiles of 128",
        )
    }

    fn summary(&self) -> String {
        let &Fp8 { matrices, rows, columns, tile: [high, across], groups, e4m3, turned } = self;
        let groups = groups.map_or(String::new(), |groups| format!(" of {groups} groups"));
        let stored = if e4m3 { " to e4m3" } else { "" };
        let turned = if turned { " turned" } else { "" };
        format!("fp8 {matrices}×{rows}×{columns} by {high}×{across}{groups}{stored}{turned}")
    }

    fn work(&self) -> Work {
        Work::elementwise(2 * wide(&[self.matrices, self.rows, self.columns]))
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::fp8(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &Fp8 { matrices, rows, columns, tile: [high, across], groups, e4m3, turned } = self;
        let (down, of_a_row) = (self.tiles_down(), self.tiles_across());
        let numbers: &[(&str, &dyn Display)] = numbers![
            "ROWS": rows,
            "COLUMNS": columns,
            "HIGH": high.min(rows.max(1)),
            "WIDE": across.min(columns.max(1)),
            "DOWN": down,
            "ACROSS": of_a_row,
            "GROUPS": groups.unwrap_or(0),
            "GROUPED": groups.is_some().into(),
            "E4M3": e4m3.into(),
            "TURNED": turned.into(),
        ];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("tiles", times(&[matrices, down, of_a_row]))?.finish())
    }
}

impl Choose for super::Fp8 {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (x, outer) = (s.dims(0), self.outer as usize);
        let (matrices, rest) = x.split_at(outer);
        let (rows, columns) = rest.split_at(self.down as usize);
        let [matrices, rows, columns] = [matrices, rows, columns].map(|dims| s.elements(dims));
        let groups = self.groups.then(|| s.size(s.dims(1)[0]).saturating_sub(1));
        let &super::Fp8 { tile, e4m3, turned, .. } = self;
        Ok(Kernel::Fp8(Fp8 { matrices, rows, columns, tile, groups, e4m3, turned }))
    }
}
