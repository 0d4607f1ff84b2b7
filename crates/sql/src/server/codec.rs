//! Values in the binary form of PostgreSQL's protocol.

use std::error::Error;

use bytes::{BufMut, BytesMut};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

use crate::error::SqlError;
use crate::value::{OwnedValue, SqlValue, ValueError};

/// A column of a row, without a copy.
struct Column<'a>(Result<SqlValue<'a>, ValueError>);

/// Returns the parameters as the library takes them.
pub(super) fn refer(values: &[OwnedValue]) -> Vec<&(dyn ToSql + Sync)> {
    values.iter().map(|value| value as &(dyn ToSql + Sync)).collect()
}

/// Returns the value of a column.
pub(crate) fn value_at(row: &Row, index: usize) -> Result<SqlValue<'_>, SqlError> {
    let column: Column<'_> = row.try_get(index)?;
    column.0.map_err(|source| SqlError::Value { index, source })
}

impl ToSql for OwnedValue {
    fn to_sql(
        &self,
        kind: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match self {
            Self::Null => return Ok(IsNull::Yes),
            Self::Integer(number) => match *kind {
                // The server derives the type from the statement, such as INT4 beside a literal.
                Type::INT2 => out.put_i16(i16::try_from(*number)?),
                Type::INT4 => out.put_i32(i32::try_from(*number)?),
                Type::TEXT | Type::VARCHAR => out.put_slice(number.to_string().as_bytes()),
                _ => out.put_i64(*number),
            },
            Self::Text(text) => out.put_slice(text.as_bytes()),
            Self::Blob(bytes) => out.put_slice(bytes),
        }
        Ok(IsNull::No)
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

impl<'a> FromSql<'a> for Column<'a> {
    fn from_sql(kind: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(read(kind, raw)))
    }

    fn from_sql_null(_: &Type) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(Ok(SqlValue::Null)))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

fn read<'a>(kind: &Type, raw: &'a [u8]) -> Result<SqlValue<'a>, ValueError> {
    let integer = |number: Option<i64>| number.map(SqlValue::Integer).ok_or(ValueError::NotWhole);
    match *kind {
        Type::BOOL => integer(raw.first().map(|&byte| byte.into())),
        Type::INT2 => integer(raw.try_into().ok().map(|raw| i16::from_be_bytes(raw).into())),
        Type::INT4 => integer(raw.try_into().ok().map(|raw| i32::from_be_bytes(raw).into())),
        Type::INT8 => integer(raw.try_into().ok().map(i64::from_be_bytes)),
        Type::NUMERIC => whole_number(raw).map(SqlValue::Integer),
        Type::TEXT | Type::VARCHAR | Type::BPCHAR | Type::NAME | Type::UNKNOWN => {
            std::str::from_utf8(raw).map(SqlValue::Text).map_err(|_| ValueError::Encoding)
        }
        Type::BYTEA => Ok(SqlValue::Blob(raw)),
        _ => Ok(SqlValue::Other("a type that no column of ours has")),
    }
}

/// Reads a NUMERIC that must be a whole number, such as the sum of integers. Its form is
/// four numbers of 16 bits (the number of digits, the power of 10,000 of the first one, the
/// sign, the decimal places), then the digits to base 10,000.
fn whole_number(raw: &[u8]) -> Result<i64, ValueError> {
    let mut words = raw.chunks_exact(2).map(|word| i16::from_be_bytes([word[0], word[1]]));
    let mut next = || words.next().ok_or(ValueError::NotWhole);
    let (digits, weight, sign, _) = (next()?, next()?, next()?, next()?);
    // 128 bits hold 38 decimal digits, so at most nine digits to base 10,000. More digits than
    // the power of the first one allows stand behind the decimal point.
    if !(-1..9).contains(&weight) || digits > weight + 1 {
        return Err(ValueError::NotWhole);
    }
    let mut number: i128 = 0;
    for place in 0..=weight {
        let digit = if place < digits { next()? } else { 0 };
        number = number * 10_000 + i128::from(digit);
    }
    let number = match sign {
        0 => number,
        // 0x4000 is the minus sign; the others are infinities and "not a number".
        0x4000 => -number,
        _ => return Err(ValueError::NotWhole),
    };
    i64::try_from(number).map_err(|_| ValueError::Range(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numeric(digits: &[i16], weight: i16, sign: i16) -> Vec<u8> {
        let head = [digits.len() as i16, weight, sign, 0];
        head.iter().chain(digits).flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn whole_number_reads_sums() {
        for (raw, expected) in [
            (numeric(&[], 0, 0), Ok(0)),
            (numeric(&[7], 0, 0x4000), Ok(-7)),
            (numeric(&[1, 2345], 1, 0), Ok(12_345)),
            // Zeros at the end are left out.
            (numeric(&[12], 2, 0), Ok(1_200_000_000)),
            (numeric(&[922, 3372, 368, 5477, 5807], 4, 0), Ok(i64::MAX)),
            (numeric(&[922, 3372, 368, 5477, 5808], 4, 0x4000), Ok(i64::MIN)),
            (
                numeric(&[922, 3372, 368, 5477, 5808], 4, 0),
                Err(ValueError::Range(i128::from(i64::MAX) + 1)),
            ),
            // A half, one and a half, a number beyond 128 bits, and "not a number".
            (numeric(&[5000], -1, 0), Err(ValueError::NotWhole)),
            (numeric(&[1, 5000], 0, 0), Err(ValueError::NotWhole)),
            (numeric(&[1], 12, 0), Err(ValueError::NotWhole)),
            (numeric(&[], 0, -0x4000), Err(ValueError::NotWhole)),
            (vec![0, 1], Err(ValueError::NotWhole)),
        ] {
            assert_eq!(whole_number(&raw), expected, "{raw:?}");
        }
    }
}
