//! Parameters of a statement, by their number.

use crate::error::SqlError;
use crate::value::{SqlValue, ToSql};

/// The parameters of one call of a statement.
pub trait Params {
    /// Calls `each` with every value, the first one first.
    ///
    /// # Errors
    /// A value fits no column, or the error of `each`.
    fn try_each(
        &self,
        each: &mut dyn FnMut(SqlValue<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError>;
}

/// Makes parameters of values of different types.
#[macro_export]
macro_rules! params {
    ($($value:expr),* $(,)?) => {
        &[$(&$value as &dyn $crate::ToSql),*] as &[&dyn $crate::ToSql]
    };
}

fn pass(
    index: usize,
    value: &dyn ToSql,
    each: &mut dyn FnMut(SqlValue<'_>) -> Result<(), SqlError>,
) -> Result<(), SqlError> {
    let value = value.to_sql().map_err(|source| SqlError::Value { index: index + 1, source })?;
    each(value)
}

impl Params for &[&dyn ToSql] {
    fn try_each(
        &self,
        each: &mut dyn FnMut(SqlValue<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError> {
        self.iter().enumerate().try_for_each(|(index, value)| pass(index, *value, each))
    }
}

impl<T: ToSql, const N: usize> Params for [T; N] {
    fn try_each(
        &self,
        each: &mut dyn FnMut(SqlValue<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError> {
        self.iter().enumerate().try_for_each(|(index, value)| pass(index, value, each))
    }
}

/// No parameters.
impl Params for () {
    fn try_each(
        &self,
        _: &mut dyn FnMut(SqlValue<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError> {
        Ok(())
    }
}

impl<T: ToSql> Params for Vec<T> {
    fn try_each(
        &self,
        each: &mut dyn FnMut(SqlValue<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError> {
        self.iter().enumerate().try_for_each(|(index, value)| pass(index, value, each))
    }
}
